"""docs/lora.md says which layers of every family carry adapters, and that its tokens are PEFT's: each row is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lora_table
import pytest
from family_table import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.spread(0, slow=12)
@pytest.mark.behaviour(75)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_with_adapters_on_its_layers_gives_peft_s_tokens_as_its_row_says(
    name: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    row = lora_table.measure(name, tiny(name), tmp_path)
    assert row.modules
    assert row.equal
    assert row.text() == lora_table.shown()[name], "run `python tests/support/lora_table.py`"


def test_the_page_has_every_family_and_no_other() -> None:
    assert list(lora_table.shown()) == list(FAMILIES)
