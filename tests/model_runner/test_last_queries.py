"""The last layer makes no queries of tokens that nobody asks for: who may, what is computed, and the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from engine_driver import GREEDY, random_prompts, tokens_of
from head_folders import build as build_head
from lora_cases import PeftOracle
from tiny_models import VOCAB_SIZE

from slotline.core import LLM, SamplingParams
from tests.proposers.test_medusa import heads_of, written

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

LEAN: dict[str, Any] = {"block_size": 4, "optimize": True}
CHUNKS: dict[str, Any] = LEAN | {"scheduler.max_batched_tokens": 24}
PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])


@contextmanager
def attended(llm: LLM) -> Iterator[dict[int, list[int]]]:
    """Query tokens of each call of attention, by layer; what a graph replays makes no calls."""
    seen: dict[int, list[int]] = {}

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(layer: Any, query: torch.Tensor, *rest: Any, **more: Any) -> Any:
            seen.setdefault(layer.index, []).append(len(query))
            return original(layer, query, *rest, **more)

        return forward

    router = llm.engine.runner.router
    before = router.routes
    router.routes = {index: (w, counting(forward), c, p) for index, (w, forward, c, p) in before.items()}
    yield seen
    router.routes = before


def last_of(seen: dict[int, list[int]]) -> tuple[list[int], list[int]]:
    """What the first and the last layer attended for."""
    return seen[0], seen[max(seen)]


@pytest.mark.spread(2)
@pytest.mark.parametrize("backend", ["torch", "cpu", "flex"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.behaviour(26, 74, 148, 158)
def test_text_with_chunks_and_hits_is_transformers(
    name: str, backend: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    llm = engines(tiny(name), backend=backend, **CHUNKS)
    assert [group.last_queries for group in llm.plan.groups].count(True) == 1
    count = 8 if backend == "flex" else 20  # one step of it takes as long as ten of the others
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    expected = [greedy(tiny(name), prompt, 20)[:count] for prompt in PROMPTS]
    assert tokens_of(llm, PROMPTS, params) == expected
    again = llm.generate(PROMPTS, params)
    assert sum(output.metrics.num_cached_tokens for output in again) > 60
    assert [output.outputs[0].token_ids for output in again] == expected


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_last_layer_attends_for_tokens_whose_logits_are_wanted(backend: str, tiny: Tiny, engines: Engines) -> None:
    """A prompt of 40 tokens in chunks of 24 and 16: none of the first chunk, the last of the second, two decodes."""
    llm = engines(tiny("llama"), backend=backend, **CHUNKS)
    with attended(llm) as seen:
        llm.generate(random_prompts([40], seed=5), evolve(GREEDY, max_tokens=3))
    first, last = last_of(seen)
    assert (first, last) == ([24, 16, 1, 1], [1, 1, 1])


@pytest.mark.behaviour(74)
def test_a_prompt_that_is_scored_attends_for_all_its_tokens(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **LEAN)
    params = evolve(GREEDY, max_tokens=2, prompt_logprobs=2, logprobs=2)
    with attended(llm) as seen:
        (output,) = llm.generate(random_prompts([30], seed=6), params)
    assert last_of(seen) == ([30, 1], [30, 1])
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 30


def test_a_step_with_an_adapter_attends_for_all_and_others_do_not(tiny: Tiny, engines: Engines, tmp_path: Path) -> None:
    path, prompt = tiny("llama"), random_prompts([30], seed=8)[0]
    oracle = PeftOracle(path, tmp_path, {"mine": {"target_modules": r".*\.(q_proj|down_proj)"}})
    llm = engines(path, **LEAN, **{"lora.name": "torch", "lora.max_adapters": 1})
    params = evolve(GREEDY, max_tokens=4)
    for name, last in (("mine", 30), (None, 1)):
        with attended(llm) as seen:
            (output,) = llm.generate([prompt], params, lora_request=oracle.request(name))
        assert output.outputs[0].token_ids == oracle.greedy(name, prompt, 4)
        assert (seen[0][0], seen[max(seen)][0]) == (30, last)


@pytest.mark.behaviour(74)
def test_drafts_are_wanted_too(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    drafter = {"drafter.name": "ngram", "drafter.tokens": 3, "drafter.ngram.min_tokens": 1, "drafter.adaptive": False}
    llm = engines(tiny("llama"), **CHUNKS, **drafter)
    prompts = [[5, 6, 7, 8] * 8, *PROMPTS]
    assert tokens_of(llm, prompts) == [greedy(tiny("llama"), prompt, 20) for prompt in prompts]
    assert llm.engine.extension("drafts") is not None
    assert llm.engine.extension("drafts").drafting.counts.accepted > 0


@pytest.mark.parametrize("backend", ["torch", "cpu", "flex"])
@pytest.mark.behaviour(74)
def test_a_tree_of_drafts_is_wanted_beside_chunks(
    backend: str, tiny: Tiny, engines: Engines, greedy: Greedy, tmp_path: Path
) -> None:
    heads = written(tmp_path / "heads", heads_of(64, VOCAB_SIZE), "shared")
    drafter = {
        "drafter.name": "medusa_tree",
        "drafter.path": str(heads),
        "drafter.tokens": 4,
        "drafter.adaptive": False,
    }
    llm = engines(tiny("llama"), backend=backend, **CHUNKS, **drafter)
    with attended(llm) as seen:
        assert tokens_of(llm, PROMPTS) == [greedy(tiny("llama"), prompt, 20) for prompt in PROMPTS]
    first, last = last_of(seen)
    assert any(1 + 4 < few < every for few, every in zip(last, first, strict=False))  # drafts, and a chunk beside them
    assert llm.engine.extension("drafts") is not None
    assert llm.engine.extension("drafts").drafting.counts.proposed > 0


def test_text_is_the_same_where_steps_overlap(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    llm = engines(tiny("qwen3"), **CHUNKS, **{"scheduler.async": True})
    for _ in range(2):
        assert tokens_of(llm, PROMPTS) == [greedy(tiny("qwen3"), prompt, 20) for prompt in PROMPTS]


def test_outputs_are_bitwise_those_of_another_cut_where_that_is_asked_for(tiny: Tiny, engines: Engines) -> None:
    params = evolve(GREEDY, logprobs=3)
    found = []
    for tokens in (24, 512):
        llm = engines(
            tiny("llama"), backend="cpu", batch_invariant=True, **LEAN, **{"scheduler.max_batched_tokens": tokens}
        )
        found.append([output.outputs[0].logprobs for output in llm.generate(PROMPTS, params)])
    assert found[0] == found[1]


def test_explain_says_so(tiny: Tiny, engines: Engines) -> None:
    text = engines(tiny("llama"), **LEAN).plan.explain()
    assert "the last layer may leave out unwanted queries" in text


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"drafter.name": "eagle", "drafter.tokens": 2}),  # it reads hidden states of whole prompts
        ("gemma4", {}),  # its last layer reads another one's cache
        ("bamba", {}),  # its layers keep states, too
    ],
)
def test_where_all_queries_are_needed_all_are_made(
    name: str, settings: dict[str, Any], tiny: Tiny, engines: Engines, tmp_path: Path
) -> None:
    path = tiny(name)
    if "drafter.name" in settings:
        settings = settings | {"drafter.path": str(build_head(tmp_path / "head", path, "eagle"))}
    llm = engines(path, **LEAN, **settings)
    assert not any(group.last_queries for group in llm.plan.groups)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["none", "auto"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.behaviour(74)
def test_on_a_gpu_text_is_transformers(name: str, mode: str, tiny: Tiny, greedy: Greedy) -> None:
    torch.set_float32_matmul_precision("highest")
    options = CHUNKS | {"block_size": 16, "memory": "64MiB", "graphs.mode": mode, "observability.progress": False}
    llm = LLM(tiny(name), device="cuda", dtype="float32", max_model_len=64, **options)
    expected = [greedy(tiny(name), prompt, 20) for prompt in PROMPTS]
    with attended(llm) as seen:
        assert tokens_of(llm, PROMPTS) == expected
    if mode == "none":
        first, last = last_of(seen)
        assert sum(last) < sum(first)
    assert tokens_of(llm, PROMPTS) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2"])
def test_on_a_gpu_queries_of_long_prompts_have_a_product_of_their_own(name: str, dtype: str, tiny: Tiny) -> None:
    """Steps of 2,048 tokens, where keys and values are computed apart from the wanted tokens' queries."""
    torch.set_float32_matmul_precision("highest")
    options = {"max_model_len": 2048, "memory": "64MiB", "graphs.mode": "none", "max_num_batched_tokens": 2048}
    options |= {"observability.progress": False, "cache.prefix_caching": False}
    llm = LLM(tiny(name, max_position_embeddings=2048), device="cuda", dtype=dtype, **options)
    prompts = random_prompts([1500, 540, 2000, 30], seed=9)
    params = evolve(GREEDY, max_tokens=1, logprobs=5)
    with attended(llm) as seen:
        found = llm.generate(prompts, params)
    assert max(seen[max(seen)]) < 5
    whole = llm.generate(prompts, evolve(params, prompt_logprobs=0))  # which need all queries
    tolerance = 0.05 if dtype == "bfloat16" else 1e-4
    for one, other in zip(found, whole, strict=True):
        (few,), (all_,) = one.outputs[0].logprobs, other.outputs[0].logprobs
        shared = few.keys() & all_.keys()
        assert len(shared) >= 4
        assert all(abs(few[token].logprob - all_[token].logprob) < tolerance for token in shared)
