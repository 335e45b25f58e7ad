"""The whole engine against transformers: the same greedy tokens, whatever batching, sharing and preemption do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engine_driver import GREEDY, mixes_decode_and_prefill, random_prompts, recorded, tokens_of
from tiny_models import FAMILIES

from slotline.core import LLM, Logprob, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
KIB_PER_TOKEN = 4 * 2 * (16 + 16) * 4 // 1024
"""Layers, KV heads, key and value, bytes of a float32."""


def pool_of(num_blocks: int, block_size: int) -> str:
    """`cache.memory` for so many usable blocks."""
    return f"{num_blocks * block_size * KIB_PER_TOKEN}KiB"


def expected(greedy: Greedy, path: Path, prompts: list[list[int]], count: int = 20) -> list[list[int]]:
    return [greedy(path, prompt, count) for prompt in prompts]


@pytest.mark.spread(5, slow=6)
@pytest.mark.parametrize(("backend", "optimize", "block_size"), [("torch", False, 4), ("cpu", True, 16)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.behaviour(18, 36, 41, 46, 52, 62, 67, 85, 100, 108, 110)
def test_every_family_gives_transformers_tokens_in_mixed_chunked_shared_batches(
    family: str, backend: str, optimize: bool, block_size: int, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(family)
    llm = engines(
        path, backend=backend, optimize=optimize, block_size=block_size, **{"scheduler.max_batched_tokens": 24}
    )
    assert {group.backend for group in llm.plan.groups} == {backend}
    with recorded(llm) as steps:
        first = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in first] == expected(greedy, path, PROMPTS)
    assert any(mixes_decode_and_prefill(step) for step in steps)
    assert max(int(step.num_scheduled.max()) for step in steps) < 40  # the longest prompt came in chunks
    again = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == expected(greedy, path, PROMPTS)
    hits = [o.metrics.num_cached_tokens for o in again]
    assert hits == [(len(p) - 1) // block_size * block_size for p in PROMPTS]


@pytest.mark.spread(3, slow=2)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "bamba"])
@pytest.mark.behaviour(152, 154)
def test_tokens_do_not_depend_on_how_keys_lie_in_a_block(
    family: str, layout: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    """Tokens first or heads first, beside windows, latents and states, over cached prefixes too."""
    path = tiny(family)
    settings = {"scheduler.max_batched_tokens": 24, "attention.layout": layout}
    llm = engines(path, **settings)
    assert {group.layout for group in llm.plan.cache_groups} == {layout}
    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == expected(greedy, path, PROMPTS)
    assert sum(o.metrics.num_cached_tokens for o in outputs) > 0


@pytest.mark.spread(3, slow=4)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.behaviour(16, 33, 39, 40, 41)
def test_preempted_requests_give_transformers_tokens(
    prefix_caching: bool, block_size: int, optimize: bool, backend: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny("llama")
    llm = engines(
        path,
        backend=backend,
        optimize=optimize,
        block_size=block_size,
        memory=pool_of(80 // block_size, block_size),
        **{"scheduler.max_batched_tokens": 24, "cache.prefix_caching": prefix_caching},
    )
    memory = llm.engine.memory
    assert memory is not None
    assert memory.num_blocks == 80 // block_size + 1
    with recorded(llm) as steps:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == expected(greedy, path, PROMPTS)
    preemptions = sum(o.metrics.num_preemptions for o in outputs)
    assert preemptions == sum(len(step.preempted) for step in steps) > 0


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3"])
@pytest.mark.behaviour(33, 39)
def test_preempted_requests_of_other_families_give_transformers_tokens(
    family: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(family)
    llm = engines(path, block_size=4, memory=pool_of(20, 4), **{"scheduler.max_batched_tokens": 24})
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == expected(greedy, path, PROMPTS)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.behaviour(39, 42)
def test_a_prefix_that_a_running_request_computed_is_shared_while_it_runs(
    block_size: int, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny("llama")
    llm = engines(path, block_size=block_size)
    (head,) = random_prompts([32], seed=5)
    prompts = [[*head, *tail] for tail in random_prompts([3, 5], seed=6)]
    first = llm.engine.add("first", prompts[0], GREEDY)
    llm.engine.step()
    llm.engine.step()
    second = llm.engine.add("second", prompts[1], GREEDY)
    while llm.engine.has_work:
        llm.engine.step()
    assert second.metrics.num_cached_tokens == 32
    assert [first.output_token_ids, second.output_token_ids] == expected(greedy, path, prompts)


def test_a_request_that_ends_in_a_full_block_is_continued_from_the_cache(
    tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny("llama")
    llm = engines(path, block_size=4)
    (prompt,) = random_prompts([12], seed=7)
    (first,) = tokens_of(llm, [prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    (output,) = llm.generate([[*prompt, *first]], GREEDY)  # 20 tokens; the last one was never computed
    assert output.metrics.num_cached_tokens == 16
    assert first + output.outputs[0].token_ids == greedy(path, prompt, 28)


def test_without_chunked_prefill_tokens_are_the_same_and_no_prompt_is_split(
    tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny("llama")
    llm = engines(path, **{"scheduler.max_batched_tokens": 44, "scheduler.chunked_prefill": False})
    with recorded(llm) as steps:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == expected(greedy, path, PROMPTS)
    prefills = sorted(int(n) for step in steps for n in step.num_scheduled if n > 1)
    assert prefills == sorted(len(p) for p in PROMPTS if len(p) > 1)


@pytest.mark.parametrize("max_batched_tokens", [1, 2, 7])
def test_a_step_may_be_smaller_than_the_number_of_requests(
    max_batched_tokens: int, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny("llama")
    llm = engines(path, **{"scheduler.max_batched_tokens": max_batched_tokens})
    with recorded(llm) as steps:
        assert tokens_of(llm, PROMPTS[:4]) == expected(greedy, path, PROMPTS[:4])
    assert max(step.num_tokens for step in steps) == max_batched_tokens


def test_more_prompts_than_rows_wait_their_turn(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path = tiny("llama")
    llm = engines(path, max_num_seqs=2)
    prompts = random_prompts([5, 9, 2, 14, 7], seed=8)
    with recorded(llm) as steps:
        assert tokens_of(llm, prompts) == expected(greedy, path, prompts)
    assert max(len(step.rows) for step in steps) == 2


@pytest.mark.behaviour(3)
def test_a_model_in_bfloat16_generates_with_each_backend(tiny: Tiny, engines: Engines) -> None:
    for backend in ("torch", "cpu"):
        llm = engines(tiny("llama"), backend=backend, dtype="bfloat16")
        assert {len(tokens) for tokens in tokens_of(llm, PROMPTS)} == {20}


def _random_params(rng: Random) -> SamplingParams:
    """Parameters of every sort, each now and then."""
    length = rng.randint(1, 15)
    choices: dict[str, Any] = {
        "top_k": rng.randint(1, 30),
        "top_p": rng.uniform(0.3, 1),
        "min_p": rng.uniform(0, 0.3),
        "logprobs": rng.randint(0, 3),
        "prompt_logprobs": rng.randint(0, 3),
        "presence_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "stop": rng.choice(["a", "e", "in", "ar"]),
        "stop_token_ids": rng.sample(range(384), 40),
        "min_tokens": rng.randint(0, length),
        "ignore_eos": True,
    }
    some = {name: value for name, value in choices.items() if rng.random() < 0.25}
    return SamplingParams(
        max_tokens=length, seed=rng.randrange(10**6), temperature=rng.choice([0, 0, 0.5, 1, 1.7]), **some
    )


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("block_size", "rows", "budget", "backend"), [(4, 5, 23, "torch"), (8, 3, 50, "cpu"), (4, 4, 3, "cpu")]
)
@pytest.mark.behaviour(16, 33, 34, 39, 45, 61, 106, 110)
def test_random_requests_give_in_a_crowd_what_they_give_alone(
    block_size: int, rows: int, budget: int, backend: str, tiny: Tiny, engines: Engines
) -> None:
    rng, path = Random(block_size * budget), tiny("llama", eos_token_id=2)
    heads = random_prompts([40, 40], seed=90)
    prompts = [
        rng.choice(heads)[: rng.randint(1, 40)] + random_prompts([rng.randint(0, 8)], seed=i)[0] for i in range(20)
    ]
    params = [_random_params(rng) for _ in prompts]
    alone = engines(path, **{"cache.prefix_caching": False})
    expected = [alone.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    crowd = engines(
        path,
        backend=backend,
        block_size=block_size,
        memory=pool_of(64 // block_size, block_size),
        max_num_seqs=rows,
        **{"scheduler.max_batched_tokens": budget},
    )
    outputs = crowd.generate(prompts, params)
    for output, want in zip(outputs, expected, strict=True):
        ours, theirs = output.outputs[0], want.outputs[0]
        assert (ours.token_ids, ours.text, ours.finish_reason, ours.stop_reason) == (
            theirs.token_ids,
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        assert _values(ours.logprobs) == pytest.approx(_values(theirs.logprobs), abs=1e-3)
        assert _values(output.prompt_logprobs) == pytest.approx(_values(want.prompt_logprobs), abs=1e-3)
    assert sum(o.metrics.num_cached_tokens for o in outputs) > 0
    if budget > 3:
        assert sum(o.metrics.num_preemptions for o in outputs) > 0


def _values(entries: Sequence[dict[int, Logprob] | None] | None) -> dict[tuple[int, int], float]:
    """Log-probabilities by place and token."""
    places = enumerate(entries or ())
    return {(i, token): value.logprob for i, entry in places if entry for token, value in entry.items()}
