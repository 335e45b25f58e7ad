"""docs/model-families.md says what every family does: each of its rows is measured again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import family_table
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.spread(0, slow=14)
@pytest.mark.parametrize("name", family_table.FAMILIES)
@pytest.mark.behaviour(18, 33, 39, 41, 46, 62)
def test_a_family_gives_transformers_tokens_with_hits_and_preemptions_as_its_row_says(
    name: str, tiny: Callable[..., Path], greedy: family_table.Greedy
) -> None:
    row = family_table.measure(name, tiny(name), greedy)
    assert row.equal
    assert row.cached > 0
    assert row.preemptions > 0
    assert row.text() == family_table.shown()[name], "run `python tests/support/family_table.py`"


def test_the_page_has_every_family_and_no_other() -> None:
    assert list(family_table.shown()) == list(family_table.FAMILIES)
