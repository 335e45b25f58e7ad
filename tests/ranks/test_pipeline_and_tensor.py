"""Four processes: layers are divided among two, and what is in each layer among two more."""

from __future__ import annotations

import pytest

from slotline.core import LLM, SamplingParams

pytestmark = pytest.mark.exhaustive

PROMPTS = ["def main(", "class A:\n    def", "import numpy as np\n", "for i in range(", "x = "]
SETTINGS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 48}


def test_four_ranks_give_one_process_text() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, seed=4, max_tokens=12, logprobs=2, ignore_eos=True)
    checked = {"observability.check_integrity": True, "observability.progress": False}
    whole = LLM(**SETTINGS, **checked, memory="16MiB")
    ranks = LLM(**SETTINGS, **checked, memory="2MiB", pipeline=2, tensor=2, **{"scheduler.async": True})
    assert [stage["device"] for stage in ranks.plan.to_json()["stages"]] == ["ranks 0 to 1", "ranks 2 to 3"]
    for params in (greedy, drawn):
        found, expected = (llm.generate(PROMPTS, params) for llm in (ranks, whole))
        assert [a.outputs[0].token_ids for a in found] == [b.outputs[0].token_ids for b in expected]
    ranks.close()
