"""Steps that overlap beside a drafter on a GPU: the same tokens, inside captured graphs too, and nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from device_drafter import Foreseeing
from engine_driver import GREEDY, random_prompts, tokens_of
from repository import SUPPORT

from slotline.core import LLM, SamplingParams
from tests.llm.test_small_model_files import FOLDER, HELD_OUT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "backend": "triton",
    "dtype": "float32",
    "memory": "2GiB",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "graphs.sizes": [4, 8, 16, 32],
}
KINDS = ("eagle", "eagle3", "medusa", "draft_model")
PARAMS = [
    SamplingParams(temperature=0, max_tokens=96, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=32, ignore_eos=True),
]


def prompts() -> list[str]:
    """Beginnings of code that no training saw, and a part of them again, which a prefix serves."""
    lines = HELD_OUT.splitlines(keepends=True)
    return ["".join(lines[:count]) for count in (6, 12, 18, 24, 24, 25)]


def drafted(kind: str, **settings: Any) -> LLM:
    path = {"drafter.path": str(FOLDER)} if kind == "draft_model" else {}
    return LLM(**SETTINGS, **path, **{"drafter.name": kind, "drafter.tokens": 3, "drafter.adaptive": False, **settings})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["none", "auto"])
def test_the_text_is_the_same_and_as_many_drafts_stand(kind: str, mode: str) -> None:
    found, lengths = [], []
    for asynchronous in (False, "auto"):
        llm = drafted(kind, **{"graphs.mode": mode, "scheduler.async": asynchronous})
        assert llm.engine.asynchronous == (asynchronous == "auto")
        both = [params for params in PARAMS for _ in range(2)]  # the second time from cached prefixes
        found.append([[o.outputs[0].token_ids for o in llm.generate(prompts(), params)] for params in both])
        drafting = llm.engine.extension("drafts").drafting
        assert drafting is not None
        assert drafting.counts.failures == 0, drafting.counts.last_failure
        lengths.append(drafting.counts.acceptance_length)
        del llm, drafting
    assert found[0] == found[1]
    assert abs(lengths[0] - lengths[1]) < 0.15


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_the_one_before_and_for_nothing_else(kind: str) -> None:
    llm = drafted(kind)
    for index, prompt in enumerate(prompts()):
        llm.engine.add(str(index), llm.tokenizer.encode(prompt), PARAMS[index % 2])
    for _ in range(12):  # prompts, and what is compiled in the first steps
        llm.engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            llm.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counts = llm.engine.extension("drafts").drafting.counts
    assert counts.failures == 0, counts.last_failure


def test_a_step_with_drafts_is_known_to_take_longer_though_the_host_waits_for_it_in_the_next() -> None:
    """Verification is made slow; whether drafts pay is decided by what was measured."""
    llm = drafted("eagle", **{"drafter.adaptive": True, "graphs.mode": "none"})
    model: Any = llm.engine.runner.model
    forward, wait = model.forward, 0.06  # seconds

    def slow(token_ids: torch.Tensor, *others: Any, **options: Any) -> Any:
        if 1 < len(token_ids) <= 4:  # one request and its drafts
            torch.cuda._sleep(int(wait * 2e9))  # cycles
        return forward(token_ids, *others, **options)

    model.forward = slow
    long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    llm.generate(prompts()[:1], long)  # kernels are compiled in its steps
    assert llm.engine.extension("drafts") is not None
    counts = llm.engine.extension("drafts").drafting.counts
    counts.decodes, counts.decode_seconds = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    llm.generate(prompts()[:1], long)
    assert min(counts.decodes.values()) > 1
    found = counts.to_json()
    assert found["verify_seconds"] > found["plain_seconds"] + wait / 2


@pytest.mark.parametrize("family", ["bamba", "qwen3_next"])
def test_states_go_back_to_what_stood(family: str, tmp_path: Path) -> None:
    path = tiny_models.build(family, tmp_path, 0)
    settings = {**SETTINGS, "memory": "64MiB", "max_model_len": 64, "max_num_seqs": 8}
    prompts = random_prompts([3, 33, 17, 30, 1, 25])
    expected = tokens_of(LLM(path, **settings), prompts)
    drafter = {"plugins.inline": (f"{SUPPORT / 'device_drafter.py'}:Foreseeing",)}
    llm = LLM(
        path, **settings, **drafter, **{"drafter.name": "foreseeing", "drafter.tokens": 3, "drafter.adaptive": False}
    )
    assert llm.engine.extension("drafts").overlap is not None
    foreseeing = type(llm.engine.extension("drafts").overlap._drafting.drafter)
    assert foreseeing.__name__ == Foreseeing.__name__
    foreseeing.texts = {tuple(p): p + t for p, t in zip(prompts, expected, strict=True)}  # type: ignore[attr-defined]
    assert tokens_of(llm, prompts, GREEDY) == expected
    assert llm.engine.extension("drafts") is not None
    assert llm.engine.extension("drafts").drafting.counts.accepted > 20
