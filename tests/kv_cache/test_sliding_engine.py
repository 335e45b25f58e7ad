"""Whole engines on models with windows: transformers' tokens, hits behind the window, memory that the window bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import GREEDY, add, random_prompts, tokens_of

from slotline.core import LLM, SamplingParams
from slotline.core.kv_cache.block_hashes import extend_hashes
from slotline.core.kv_cache.block_pool import NULL_BLOCK
from slotline.plugins.model_families.transformers_model import TransformersDecoder
from slotline.registry.errors import ModelError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
"""Gemma 3's own proportion: five layers with a window to one without, so that pages differ."""
SMALL: dict[str, Any] = {"block_size": 4, "scheduler.max_batched_tokens": 24}


def expected(greedy: Greedy, path: Path, prompts: list[list[int]], count: int = 20) -> list[list[int]]:
    return [greedy(path, prompt, count) for prompt in prompts]


def blocks_held(llm: LLM, group: int) -> int:
    """Blocks that the rows of a cache group hold."""
    return sum(block != NULL_BLOCK for held in llm.engine.scheduler.cache.groups[group].blocks for block in held)


@pytest.mark.spread(1, slow=1)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.behaviour(33, 39, 64, 148, 153, 154)
def test_groups_of_unequal_blocks_give_transformers_tokens_with_hits_and_preemptions(
    backend: str, asynchronous: bool, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny("gemma3", **HYBRID)
    settings = {**SMALL, "backend": backend, "scheduler.async": asynchronous}
    llm = engines(path, **settings)
    sizes = {group.name: group.block_size for group in llm.plan.cache_groups}
    assert sizes == {"sliding": 4, "full": 16}
    assert tokens_of(llm, PROMPTS) == expected(greedy, path, PROMPTS)
    again = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == expected(greedy, path, PROMPTS)
    assert [o.metrics.num_cached_tokens for o in again] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
    pool = llm.plan.pool
    assert pool is not None
    settings["scheduler.max_batched_tokens"] = 12
    tight = engines(path, **settings, memory=f"{14 * pool.block_bytes // 1024}KiB")
    outputs = tight.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == expected(greedy, path, PROMPTS)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0


@pytest.mark.spread(1, slow=1)
@pytest.mark.parametrize(("asynchronous", "optimize"), [(False, False), (True, False), (False, True)])
def test_chunks_give_transformers_tokens_with_hits_and_preemptions(
    asynchronous: bool, optimize: bool, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny("llama4")
    settings = {**SMALL, "scheduler.async": asynchronous, "optimize": optimize}
    llm = engines(path, **settings)
    assert [(g.kv_spec, g.block_size, len(g.layers)) for g in llm.plan.cache_groups] == [
        ("chunked_local", 4, 3),
        ("full", 12, 1),
    ]
    assert tokens_of(llm, PROMPTS) == expected(greedy, path, PROMPTS)
    again = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == expected(greedy, path, PROMPTS)
    assert [o.metrics.num_cached_tokens for o in again] == [(len(p) - 1) // 12 * 12 for p in PROMPTS]
    pool = llm.plan.pool
    assert pool is not None
    settings["scheduler.max_batched_tokens"] = 12
    tight = engines(path, **settings, memory=f"{16 * pool.block_bytes // 1024}KiB")
    outputs = tight.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == expected(greedy, path, PROMPTS)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0


def test_positions_at_which_llama_4_tunes_its_attention_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match=r"'model.layers.0.self_attn' tunes .* from position 31 on.*is 64"):
        LLM(tiny("llama4", floor_scale=32), dtype="float32", max_model_len=64, memory="1MiB")


@pytest.mark.parametrize(("settings", "length"), [({"floor_scale": 32}, 31), ({"floor_scale": 512}, 511), ({}, 512)])
def test_llama_4_runs_with_its_default_length_which_ends_before_the_tuning(
    settings: dict[str, int], length: int, tiny: Tiny, greedy: Greedy
) -> None:
    path = tiny("llama4", **settings)
    llm = LLM(path, dtype="float32", memory="1MiB", device="cpu")
    assert llm.engine.limits.max_model_len == length
    prompt = PROMPTS[0][:8]
    outputs = llm.generate({"prompt_token_ids": prompt}, GREEDY, progress=False)
    assert list(outputs[0].outputs[0].token_ids) == greedy(path, prompt, GREEDY.max_tokens)


@pytest.mark.spread(2)
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_asynchronous_steps_free_blocks_that_the_step_in_flight_does_not_read(
    family: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(family)
    llm = engines(path, **SMALL, **{"scheduler.async": True})
    for _ in range(2):
        assert tokens_of(llm, PROMPTS) == expected(greedy, path, PROMPTS)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_never_holds_more_blocks_than_its_spec_says(asynchronous: bool, tiny: Tiny, engines: Engines) -> None:
    path = tiny("gemma3", **HYBRID)
    llm = engines(path, block_size=4, **{"scheduler.max_batched_tokens": 8, "scheduler.async": asynchronous})
    groups = llm.engine.scheduler.cache.groups
    add(llm, "one", PROMPTS[3])
    most = [0] * len(groups)
    while llm.engine.has_work:
        llm.engine.step()
        most = [max(old, blocks_held(llm, group.index)) for old, group in zip(most, groups, strict=True)]
    assert all(held <= group.spec.max_blocks_held() for held, group in zip(most, groups, strict=True))
    # 7 before the window's query and 8 tokens, or 16 of two steps, in blocks of 4
    assert groups[0].spec.max_blocks_held() == (7 if asynchronous else 5)


@pytest.mark.behaviour(39, 42)
def test_a_prefix_whose_beginning_has_left_the_cache_is_still_a_hit_behind_the_window(
    tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny("mistral")
    llm = engines(path, **SMALL)
    (prompt,) = random_prompts([40], seed=11)
    assert tokens_of(llm, [prompt]) == expected(greedy, path, [prompt])
    cache = llm.engine.scheduler.cache
    hashes = extend_hashes(add(llm, "probe", prompt), np.asarray(prompt, np.int32), 9, cache.hash_block_size)
    llm.engine.abort("probe")
    for block_hash in hashes[:6]:  # taken for something else
        cache.pool._forget(cache.pool.lookup(0, block_hash))  # type: ignore[arg-type]
    (output,) = llm.generate([prompt], GREEDY)
    assert output.metrics.num_cached_tokens == 36
    assert [output.outputs[0].token_ids] == expected(greedy, path, [prompt])


def test_as_many_requests_run_together_as_the_figures_of_the_plan_say(tiny: Tiny, engines: Engines) -> None:
    length, wanted = 512, 12
    path = tiny("gemma3", **HYBRID, max_position_embeddings=length)
    settings = {"block_size": 4, "max_model_len": length, "max_num_seqs": 32, "backend": "cpu"}
    pool = engines(path, **settings, memory="1MiB").plan.pool
    assert pool is not None
    memory = wanted * pool.bytes_per_request
    optimum = memory / pool.optimal_bytes_per_request
    llm = engines(path, **settings, memory=f"{memory // 1024}KiB")
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True, detokenize=False)
    prompts = random_prompts([length - 128] * wanted, seed=12)
    requests = [add(llm, str(i), prompt, params) for i, prompt in enumerate(prompts)]
    together = 0
    while llm.engine.has_work:
        llm.engine.step()
        decoding = [r for r in llm.engine.scheduler.running if llm.engine.rows.num_tokens[r.row] > len(prompts[0])]
        together = max(together, len(decoding))
    assert sum(request.metrics.num_preemptions for request in requests) == 0
    assert together == wanted >= 0.95 * optimum


def test_a_window_keeps_the_same_tokens_with_and_without_its_own_spec(tiny: Tiny, engines: Engines) -> None:
    path = tiny("mistral", max_position_embeddings=1024)
    settings = {"block_size": 4, "max_model_len": 1024, "backend": "cpu"}
    own, kept = engines(path, **settings), engines(path, **settings, **{"cache.kv_spec": {"sliding": "full"}})
    assert [g.kv_spec for g in own.plan.cache_groups + kept.plan.cache_groups] == ["sliding", "full"]
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, detokenize=False)
    assert tokens_of(own, PROMPTS[:3], params) == tokens_of(kept, PROMPTS[:3], params)


def test_llama_4_with_long_positions_gets_the_longest_length_without_tuning_by_default(tiny: Tiny) -> None:
    facts = TransformersDecoder().inspect(tiny("llama4", max_position_embeddings=131072))
    assert (facts.max_model_len, facts.default_max_model_len) == (131072, 8191)
    assert TransformersDecoder().inspect(tiny("mistral")).default_max_model_len is None


@pytest.mark.parametrize("optimize", [False, True])
def test_lfm2_of_full_attention_layers_only_runs(optimize: bool, tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path = tiny("lfm2", layer_types=["full_attention"] * 4)
    llm = engines(path, optimize=optimize)
    assert tokens_of(llm, PROMPTS) == expected(greedy, path, PROMPTS)
    staged = engines(
        path, optimize=optimize, **{"parallel.pipeline": ("cpu", "cpu")}
    )  # its parts are found by inspection
    assert tokens_of(staged, PROMPTS) == expected(greedy, path, PROMPTS)
