"""Drafters over several ranks: whole on each of them, so that all draft the same and verify the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dflash_folders
import head_folders
import mtp_checkpoints
import pytest
from engine_driver import random_prompts
from thread_ranks import ThreadRanks
from tiny_models import VOCAB_SIZE

from slotline.core import LLM, SamplingParams
from tests.proposers.test_medusa import heads_of, written

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
PROMPTS = random_prompts([5, 40, 17, 2, 30], seed=3)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=2)
DRAFTERS = [
    *("eagle3", "medusa_tree", "draft_model", "mtp"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("ngram", "suffix", "eagle", "dflash", "medusa")),
]


def checkpoints(name: str, tiny: Tiny, root: Path) -> tuple[Path, Path | None]:
    """The checkpoint that a drafter drafts for, and the drafter's own folder."""
    model = tiny("llama_deep" if name in ("eagle3", "dflash") else "llama")
    if name in ("eagle", "eagle3"):
        return model, head_folders.build(root / name, model, name)
    if name == "dflash":
        return model, dflash_folders.build(root / name, model)
    if name.startswith("medusa"):
        return model, written(root / name, heads_of(64, VOCAB_SIZE), "shared")
    if name == "mtp":
        return mtp_checkpoints.build(root / name, tiny("qwen2"), "qwen2"), None
    return model, model if name == "draft_model" else None


def answered(llm: LLM) -> list[tuple[list[int], list[list[tuple[int, float]]]]]:
    """Tokens of each prompt, and the likeliest ones at each place with their log-probabilities."""
    outputs = [one.outputs[0] for one in llm.generate([{"prompt_token_ids": one} for one in PROMPTS], PARAMS)]
    return [
        (list(one.token_ids), [[(token, p.logprob) for token, p in entry.items()] for entry in one.logprobs or ()])
        for one in outputs
    ]


def counts(llm: LLM) -> tuple[int, int, int]:
    found = llm.engine.extension("drafts").drafting.counts
    return found.proposed, found.accepted, found.failures


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_drafts_over_ranks_what_it_drafts_alone(
    name: str, tiny: Tiny, tmp_path: Path, engines: Callable[..., LLM]
) -> None:
    model, folder = checkpoints(name, tiny, tmp_path)
    settings: dict[str, Any] = {"drafter.name": name, "drafter.tokens": 4, "drafter.adaptive": False}
    settings |= {} if folder is None else {"drafter.path": str(folder)}
    settings |= {"scheduler.max_batched_tokens": 24, "cache.memory": "8MiB"}  # prompts in chunks
    ranks = ThreadRanks(model, dtype="float32", **settings)
    alone = LLM(model, dtype="float32", **settings)
    found = ranks.same(answered)
    expected = answered(alone)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        for own, other in zip(ours, theirs, strict=True):
            assert [token for token, _ in own] == [token for token, _ in other]
            assert [p for _, p in own] == pytest.approx([p for _, p in other], abs=1e-4)
    proposed, accepted, failures = ranks.same(counts)
    assert (proposed, accepted, failures) == counts(alone)
    assert failures == 0
    if name not in ("ngram", "suffix"):
        assert proposed > 0
    ranks.close()


@pytest.mark.parametrize("overlapped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_lengths_adapt_to_the_times_of_rank_0_alone(tiny: Tiny, overlapped: bool) -> None:
    settings = {"drafter.name": "draft_model", "drafter.path": str(tiny("llama")), "scheduler.async": overlapped}
    ranks = ThreadRanks(tiny("llama"), **settings, **{"drafter.adaptive": True, "cache.memory": "8MiB"})
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": one} for one in PROMPTS]
    drafting = [llm.engine.extension("drafts").drafting for llm in ranks.llms]
    ranks.same(lambda llm: [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)])
    first, other = (one.control.to_json() for one in drafting)
    assert first == other
    assert first["step_seconds_per_token"] + first["step_seconds"] > 0
    assert sum(first["chosen"]) > 0
    ranks.close()
