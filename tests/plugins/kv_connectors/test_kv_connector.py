"""A KV connector: the pool's evicted blocks come back as prefix hits, and a load that fails costs no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import GREEDY, random_prompts, tokens_of
from repository import SUPPORT
from tiny_engines import everything_returned

from slotline.core import LLM
from slotline.registry.errors import CapacityError, ConfigError, NegotiationError, PluginNotFoundError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

PROMPTS = random_prompts([33, 40, 37, 26], seed=5)
HOST: dict[str, Any] = {"kv_connector.name": "host_memory", "kv_connector.host_memory.memory": "1MiB"}
SMALL: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 2}
FAILING = f"{SUPPORT / 'failing_connector.py'}:Failing"
HYBRID: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}


def tight(llm: LLM, blocks: int) -> str:
    """Memory of a pool with so many blocks."""
    assert llm.plan.pool is not None
    return f"{-(-blocks * llm.plan.pool.block_bytes // 1024)}KiB"


def cached(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, int]]:
    """Of each prompt, served alone: tokens from a cache, and those of them that the connector brought."""
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    return [(o.metrics.num_cached_tokens, o.metrics.num_loaded_tokens) for o in outputs]


@pytest.mark.spread(1)
@pytest.mark.behaviour(96, 161)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_evicted_prefixes_come_back_from_host_memory(
    asynchronous: bool, backend: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny("llama")
    settings = {**SMALL, "backend": backend, "scheduler.async": asynchronous}
    memory = tight(engines(path, **settings), 16)  # one request's blocks, hardly more
    want = [greedy(path, prompt, 20) for prompt in PROMPTS]
    plain, llm = engines(path, **settings, memory=memory), engines(path, **settings, memory=memory, **HOST)
    for _ in range(2):
        assert [tokens_of(llm, [prompt])[0] for prompt in PROMPTS] == want
        assert [tokens_of(plain, [prompt])[0] for prompt in PROMPTS] == want
    assert all(hit == 0 for hit, _ in cached(plain, PROMPTS))
    hits = cached(llm, PROMPTS)
    assert [hit for hit, _ in hits] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
    assert all(0 < loaded <= hit for hit, loaded in hits)
    everything_returned(llm)


@pytest.mark.behaviour(161)
def test_preempted_requests_and_those_that_share_a_prefix_take_blocks_from_host_memory(
    tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny("llama")
    settings = {**SMALL, "max_num_seqs": 4}
    llm = engines(path, **settings, memory=tight(engines(path, **settings), 20), **HOST)
    prompts = [*PROMPTS, PROMPTS[0], PROMPTS[0][:20] + PROMPTS[1][:15]]
    for _ in range(3):
        assert tokens_of(llm, prompts) == [greedy(path, prompt, 20) for prompt in prompts]
    outputs = llm.generate(prompts, GREEDY)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    assert sum(o.metrics.num_loaded_tokens for o in outputs) > 0
    everything_returned(llm)


@pytest.mark.spread(1)
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v2"])
def test_groups_with_windows_and_latents_come_back_too(
    family: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(family, **(HYBRID if family == "gemma3" else {}))
    settings = {**SMALL, "max_num_batched_tokens": 12}
    memory = tight(engines(path, **settings), 16)
    llm = engines(path, **settings, memory=memory, **HOST)
    for _ in range(2):
        assert [tokens_of(llm, [prompt])[0] for prompt in PROMPTS] == [greedy(path, p, 20) for p in PROMPTS]
    assert all(0 < loaded <= hit for hit, loaded in cached(llm, PROMPTS))


@pytest.mark.spread(7)
@pytest.mark.behaviour(38, 96)
@pytest.mark.parametrize("how", ["load", "late", "some", "wait", "held", "failed", "save"])
@pytest.mark.parametrize("mode", ["plain", "asynchronous", "drafted"])
def test_a_connector_that_fails_costs_its_hits_and_no_token(
    how: str, mode: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny("llama")
    modes: dict[str, dict[str, Any]] = {
        "plain": {"scheduler.async": False},
        "asynchronous": {"scheduler.async": True},
        "drafted": {"drafter.name": "ngram", "drafter.tokens": 3},
    }
    settings = {**SMALL, **modes[mode], "memory": tight(engines(path, **SMALL), 32)}
    failing = {"plugins.inline": (FAILING,), "kv_connector.name": "failing", "kv_connector.failing.how": how}
    llm = engines(path, **settings, **failing)
    prompts = [*PROMPTS, PROMPTS[0][:16] + PROMPTS[2][:20]]
    for _ in range(2):
        assert tokens_of(llm, prompts) == [greedy(path, prompt, 20) for prompt in prompts]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * len(prompts)
    loaded = sum(o.metrics.num_loaded_tokens for o in outputs)
    assert (loaded > 0) == (how == "some")
    again = sum(o.metrics.num_preemptions for o in outputs)
    assert (again > 0) == (how in ("load", "late", "some", "wait", "failed"))
    everything_returned(llm)


def test_what_failed_is_not_found_again_by_anyone(tiny: Tiny, engines: Engines) -> None:
    """The blocks of a failed load hold garbage, under a good hash until the failure is known."""
    path = tiny("llama")
    settings = {**SMALL, "memory": tight(engines(path, **SMALL), 16)}
    failing = {"plugins.inline": (FAILING,), "kv_connector.name": "failing", "kv_connector.failing.how": "late"}
    llm = engines(path, **settings, **failing)
    for prompt in PROMPTS:
        tokens_of(llm, [prompt])
    (hit, loaded), pool = cached(llm, PROMPTS[:1])[0], llm.engine.scheduler.cache.pool
    assert (hit, loaded) == (0, 0)
    pool.check()
    assert cached(llm, PROMPTS[:1]) == [(32, 0)]  # from the pool, computed again


def test_new_weights_forget_what_was_kept(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    llm = engines(path, **SMALL, memory=tight(engines(path, **SMALL), 16), **HOST)
    tokens_of(llm, PROMPTS)
    llm.engine.reload_weights()
    assert cached(llm, PROMPTS[:1]) == [(0, 0)]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such plugin": ({"kv_connector.name": "hots_memory"}, PluginNotFoundError, "host_memory"),
    "no prefix caching": ({**HOST, "cache.prefix_caching": False}, NegotiationError, "cache.prefix_caching is false"),
    "too little": ({**HOST, "kv_connector.host_memory.memory": "1KiB"}, CapacityError, "holds no block"),
    "no size": ({**HOST, "kv_connector.host_memory.memory": "much"}, ConfigError, "'much' is not a size"),
    "wrong key": ({**HOST, "kv_connector.host_memory.size": "1MiB"}, ConfigError, "size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_are_refused_with_the_value_and_the_fix(name: str, tiny: Tiny, engines: Engines) -> None:
    settings, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        engines(tiny("llama"), **settings)


def test_explain_names_the_connector_and_where_it_was_asked_for(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **HOST)
    text = llm.plan.explain()
    assert "kv_connector host_memory (slotline" in text
    assert "kv_connector.name" in text
