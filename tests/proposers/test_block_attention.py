"""Blocks of queries over a drafter's own layers: what they see, on which backends, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import add, random_prompts, run_all, tokens_of
from repository import SUPPORT

from slotline.core import LLM
from slotline.registry.errors import NegotiationError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
LENGTHS = (5, 40, 17, 2, 30, 12)


def errors_of(llm: LLM) -> list[float]:
    """By how much outputs of blocks differed from dense attention."""
    found: list[float] = type(llm.engine.extension("drafts").drafting.drafter).errors
    return found


def settings_of(drafter: str, name: str) -> dict[str, Any]:
    return {
        "plugins.inline": (f"{SUPPORT / 'block_drafter.py'}:{drafter}",),
        "drafter.name": name,
        "drafter.tokens": 3,
        "drafter.adaptive": False,
        "memory": "8MiB",
    }


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("drafter", "name"),
    [("BlockReader", "block_reader"), ("AttendsFirst", "attends_first"), ("CausalReader", "causal_reader")],
)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_blocks_see_known_tokens_and_each_other(
    drafter: str, name: str, backend: str, tiny: Tiny, engines: Engines
) -> None:
    """Prompts in chunks, cached prefixes and texts up to the longest; drafts that fell are in no later context."""
    path, prompts = tiny("llama_deep"), random_prompts(LENGTHS, seed=3)
    llm = engines(path, **settings_of(drafter, name), backend=backend, max_num_batched_tokens=16)
    expected = tokens_of(engines(path), prompts)
    for _ in range(2):
        assert tokens_of(llm, prompts) == expected
    drafting = llm.engine.extension("drafts").drafting
    assert drafting.counts.failures == 0, drafting.counts.last_failure
    assert drafting.counts.accepted < drafting.counts.proposed
    assert len(errors_of(llm)) > 100
    assert max(errors_of(llm)) < 1e-5


def test_preempted_requests_fill_their_cache_again(tiny: Tiny, engines: Engines) -> None:
    path, prompts = tiny("llama_deep"), random_prompts((30, 25, 40, 10, 33, 28), seed=8)
    small = {"memory": "160KiB", "max_num_batched_tokens": 24}
    llm = engines(path, **{**settings_of("BlockReader", "block_reader"), **small})
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
    run_all(llm)
    assert [r.output_token_ids for r in requests] == tokens_of(engines(path), prompts)
    assert sum(r.metrics.num_preemptions for r in requests) > 0
    errors = errors_of(llm)
    assert sum(error < 1e-5 for error in errors) / len(errors) > 0.9  # where blocks are short


@pytest.mark.parametrize(
    ("drafter", "name", "words"),
    [
        ("Wrong", "wrong", "attend_block was called with causal=False, and the drafter declares block_attention = 'c"),
        ("TooLarge", "too_large", "attend_block was called for 5 queries of a request"),
    ],
)
def test_other_blocks_than_declared_cost_drafts_and_are_told(
    drafter: str, name: str, words: str, tiny: Tiny, engines: Engines
) -> None:
    path, prompts = tiny("llama"), random_prompts((5, 9), seed=3)
    llm = engines(path, **settings_of(drafter, name))
    assert tokens_of(llm, prompts) == tokens_of(engines(path), prompts)
    counts = llm.engine.extension("drafts").drafting.counts
    assert counts.failures > 0
    assert words in counts.last_failure
    assert counts.proposed == 0


def test_a_backend_without_keys_ahead_is_refused_for_full_blocks_and_not_for_causal_ones(
    tiny: Tiny, tmp_path: Path
) -> None:
    (tmp_path / "causal.py").write_text(
        "from attrs import evolve\n"
        "from slotline.backends.torch_sdpa import descriptor as found\n"
        "from slotline.backends.torch_sdpa.backend import TorchBackend\n"
        "from slotline.registry import Flag\n\n\n"
        "class Causal(TorchBackend):\n"
        "    descriptor = evolve(\n"
        "        found, name='causal', factory='', capabilities=evolve(found.capabilities, keys_ahead=Flag(False))\n"
        "    )\n"
    )
    path, plugin = tiny("llama"), f"{tmp_path / 'causal.py'}:Causal"
    for drafter, name in (("CausalReader", "causal_reader"), ("BlockReader", "block_reader")):
        settings = {**settings_of(drafter, name), "attention.backend": "causal"}
        settings["plugins.inline"] = (*settings["plugins.inline"], plugin)
        if name == "causal_reader":
            LLM(path, device="cpu", **settings)
            continue
        with pytest.raises(NegotiationError, match=r"keys_ahead.* = true \(model: full_1 layers, block_reader.own\)"):
            LLM(path, device="cpu", **settings)
