"""Shared experts in two real processes: the text of one process, before and after the experts have moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import RequestError

pytestmark = pytest.mark.exhaustive

PROMPTS = ("def main(", "class Row:\n    def", "import os, sys\n", "for word in argv:")
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("qwen3_moe", tmp_path_factory.mktemp("mixture") / "model")


@pytest.fixture(scope="module")
def shared(model: Path) -> LLM:
    parallel: dict[str, Any] = {"parallel.expert": 2, "parallel.redundant_experts": 2, "parallel.rebalance_steps": 6}
    return LLM(model=model, tensor=2, memory="16MiB", **{"observability.check_integrity": True, **parallel})


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, progress=False)]


def test_the_text_is_that_of_one_process_before_and_after_experts_have_moved(model: Path, shared: LLM) -> None:
    alone = LLM(model=model, memory="16MiB")
    wanted = tokens(alone)
    with pytest.raises(RequestError, match="the tokens of experts are not counted"):
        alone.rebalance_experts()
    assert tokens(shared) == wanted
    engine: Any = shared.engine
    assert engine.balance.last is not None
    assert tokens(shared) == wanted
    report = shared.rebalance_experts()
    assert report.after <= report.before
    assert tokens(shared) == wanted
    shared.reload_weights()  # which places the experts as at first
    assert tokens(shared) == wanted
