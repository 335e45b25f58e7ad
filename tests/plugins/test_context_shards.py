"""The keys of one request over several shards of the cache: the same text, hits and preemptions; and who is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from context_shards_cases import DECODES, MIXED, compare
from engine_driver import GREEDY, mixes_decode_and_prefill, random_prompts, recorded, tokens_of
from repository import SUPPORT
from tiny_engines import everything_returned

from slotline.core import LLM
from slotline.plugins.context_shards.attention import local_lens
from slotline.registry.errors import ConfigError, NegotiationError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(8, 162)]

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
SMALL: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 24}
WITHOUT_LSE = f"{SUPPORT / 'backend_without_lse.py'}:descriptor"


@pytest.mark.parametrize(("num_shards", "size"), [(2, 4), (3, 16), (4, 1)])
def test_each_token_is_in_one_shard_and_its_local_length_counts_those_before_it(num_shards: int, size: int) -> None:
    shard_of = np.arange(200) // size % num_shards
    for shard in range(num_shards):
        want = [int((shard_of[:count] == shard).sum()) for count in range(201)]
        assert local_lens(np.arange(201), shard, num_shards, size).tolist() == want


@pytest.mark.spread(5)
@pytest.mark.parametrize("requests", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("backend", "num_shards"), [("torch", 2), ("cpu", 3), ("flex", 2)])
def test_shards_merge_to_the_attention_and_the_lse_of_the_whole(
    backend: str, num_shards: int, sinks: bool, requests: list[tuple[int, int]]
) -> None:
    output, lse = compare(backend, "cpu", torch.float32, requests, num_shards, sinks=sinks)
    assert output < 2e-6
    assert lse < 4e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend", "num_shards", "asynchronous"),
    [
        ("llama", "torch", 2, False),
        ("llama", "cpu", 2, True),
        ("llama", "cpu", 3, False),
        ("qwen3", "flex", 2, False),
        ("deepseek_v2", "torch", 2, False),
    ],
)
def test_shards_give_transformers_tokens_with_chunks_hits_and_preemptions(
    family: str, backend: str, num_shards: int, asynchronous: bool, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(family)
    settings = {**SMALL, "backend": backend, "scheduler.async": asynchronous, "parallel.context_shards": num_shards}
    llm = engines(path, **settings)
    want = [greedy(path, prompt, 20) for prompt in PROMPTS]
    with recorded(llm) as schedules:
        assert tokens_of(llm, PROMPTS) == want
    assert any(mixes_decode_and_prefill(schedule) for schedule in schedules)
    block = llm.plan.block_size
    assert block == 4 * num_shards
    again = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == want
    assert [o.metrics.num_cached_tokens for o in again] == [(len(p) - 1) // block * block for p in PROMPTS]
    everything_returned(llm)
    assert llm.plan.pool is not None
    memory = f"{-(-(60 // block + 4) * llm.plan.pool.block_bytes // 1024)}KiB"
    tight = engines(path, **settings, memory=memory)
    outputs = tight.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == want
    assert sum(o.metrics.num_preemptions for o in outputs) > 0


def test_each_shard_holds_its_own_part_of_the_keys_and_no_more(tiny: Tiny, engines: Engines) -> None:
    whole = engines(tiny("llama"), **SMALL)
    llm = engines(tiny("llama"), **SMALL, **{"parallel.context_shards": 2})
    sharded: Any = llm.engine.runner.router.caches()[0]
    first, second = (cache.key for cache in sharded.shards)
    report, alone = llm.engine.memory, whole.engine.memory
    assert report is not None
    assert alone is not None
    assert len(first) == len(second) == report.num_blocks  # a kernel block of each block
    assert (report.num_blocks - 1) * report.block == (alone.num_blocks - 1) * alone.block
    first.zero_(), second.zero_()
    llm.generate([PROMPTS[1]], GREEDY)  # 33 + 19 keys: 13 kernel blocks of 4, 7 of them in the first shard
    assert [int(part.flatten(1).any(1).sum()) for part in (first, second)] == [7, 6]


def test_explain_says_what_a_block_is_and_where_it_lies(tiny: Tiny, engines: Engines) -> None:
    text = " ".join(engines(tiny("llama"), **SMALL, **{"parallel.context_shards": 2}).plan.explain().split())
    assert "parallel.context_shards 2 -> 2" in text
    assert "a block of the pool is 2 times 4 tokens, in turn on cpu, cpu" in text


def test_a_backend_that_returns_no_lse_is_refused_with_the_reason(tiny: Tiny, engines: Engines) -> None:
    settings = {**SMALL, "plugins.inline": (WITHOUT_LSE,), "parallel.context_shards": 2}
    with pytest.raises(NegotiationError) as caught:
        engines(tiny("llama"), **settings, backend="without_lse")
    assert any(reason.code == "N176" for reason in caught.value.reasons)
    assert "parallel.context_shards = 2" in str(caught.value)
    chosen = engines(tiny("llama"), **settings, backend="auto").plan.groups[0]
    reasons = {item.name: [reason.code for reason in item.reasons] for item in chosen.rejected}
    assert reasons["without_lse"] == ["N176"]


REFUSED: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "window": ("mistral", {}, NegotiationError, "layers of kind sliding"),
    "states": ("jamba", {}, NegotiationError, "keeps states"),
    "alibi": ("bloom", {}, NegotiationError, "BloomForCausalLM biases scores by distance"),
    "microbatches": ("llama", {"scheduler.microbatches": 2}, NegotiationError, "a step passes the shards whole"),
    "drafter": ("llama", {"drafter.name": "ngram"}, NegotiationError, "drafts are not verified over shards"),
    "connector": ("llama", {"kv_connector.name": "host_memory"}, NegotiationError, "lie in several caches"),
    "cascade": ("llama", {"attention.cascade": True}, NegotiationError, "attention.cascade = true"),
    "stages": (
        "llama",
        {"parallel.pipeline": ("cpu", "cpu")},
        ConfigError,
        r"with parallel.pipeline = \('cpu', 'cpu'\)",
    ),
    "none": ("llama", {"parallel.context_shards": 0}, ConfigError, "0 is neither a number from 1 on"),
    "other device": ("llama", {"parallel.context_shards": ("cuda:7", "cuda:8")}, ConfigError, "cuda"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_know_shards_is_refused_with_the_value_and_the_fix(
    name: str, tiny: Tiny, engines: Engines
) -> None:
    family, settings, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        engines(tiny(family), **{**SMALL, "parallel.context_shards": 2, **settings})
