"""Prompts that leave out the layers behind the last cache: who may, what is computed, and the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from engine_driver import GREEDY, add, random_prompts, recorded, run_all, tokens_of
from lora_cases import PeftOracle
from tiny_models import SHARING_FAMILIES

from slotline.core import LLM
from slotline.core.batch.fast_prefill_batch import FastPrefillBatch
from slotline.planner.fast_prefill import trailing_readers
from slotline.registry.contracts import AttentionBatch
from slotline.registry.errors import NegotiationError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

FAST: dict[str, Any] = {"cache.kv_sharing_fast_prefill": True, "block_size": 4}
PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])


@contextmanager
def counted(llm: LLM) -> Iterator[list[list[int]]]:
    """Tokens that each decoder layer's MLP sees, a list for each layer."""
    layers = llm.engine.runner.model.hf_model.base_model.layers
    seen: list[list[int]] = [[] for _ in layers]

    def note(own: list[int]) -> Callable[..., None]:
        return lambda _module, inputs: own.append(inputs[0].shape[-2])

    hooks = [layer.mlp.register_forward_pre_hook(note(own)) for layer, own in zip(layers, seen, strict=True)]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.spread(2)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", SHARING_FAMILIES)
@pytest.mark.behaviour(26, 74, 148, 158)
def test_text_with_chunks_and_hits_is_transformers(
    name: str, backend: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    llm = engines(tiny(name), backend=backend, **FAST, **{"scheduler.max_batched_tokens": 24})
    expected = [greedy(tiny(name), prompt, 20) for prompt in PROMPTS]
    assert tokens_of(llm, PROMPTS) == expected
    again = llm.generate(PROMPTS, GREEDY)
    assert sum(output.metrics.num_cached_tokens for output in again) > 60
    assert [output.outputs[0].token_ids for output in again] == expected


@pytest.mark.behaviour(74, 158)
@pytest.mark.parametrize("name", SHARING_FAMILIES)
def test_only_tokens_whose_logits_are_wanted_pass_the_layers_behind_the_last_cache(
    name: str, tiny: Tiny, engines: Engines
) -> None:
    """A prompt of 40 tokens in chunks of 24 and 16: the last layers see one token of it."""
    llm = engines(tiny(name), **FAST, **{"scheduler.max_batched_tokens": 24})
    readers = len(trailing_readers(llm.engine.runner.model.facts.layers))
    prompt = random_prompts([40], seed=5)
    params = evolve(GREEDY, max_tokens=3)
    with counted(llm) as seen:
        llm.generate(prompt, params)
    assert seen[:-readers] == [[24, 16, 1, 1]] * (6 - readers)
    assert seen[-readers:] == [[1, 1, 1]] * readers  # none of the first chunk, the last of the second, two decodes
    plain = engines(tiny(name), block_size=4, **{"scheduler.max_batched_tokens": 24})
    with counted(plain) as whole:
        plain.generate(prompt, params)
    assert whole == [[24, 16, 1, 1]] * 6


@pytest.mark.behaviour(74)
def test_a_prompt_that_is_scored_goes_through_all_layers(tiny: Tiny, engines: Engines) -> None:
    path, prompt = tiny("gemma4"), random_prompts([30], seed=6)
    params = evolve(GREEDY, max_tokens=2, prompt_logprobs=2, logprobs=2)
    llm = engines(path, **FAST)
    with counted(llm) as seen:
        (fast,) = llm.generate(prompt, params)
    (plain,) = engines(path, block_size=4).generate(prompt, params)
    assert seen == [[30, 1]] * 6
    assert fast.prompt_logprobs == plain.prompt_logprobs
    assert fast.outputs[0].logprobs == plain.outputs[0].logprobs


def test_a_step_with_an_adapter_runs_all_layers_and_others_do_not(tiny: Tiny, engines: Engines, tmp_path: Path) -> None:
    path, prompt = tiny("gemma4"), random_prompts([30], seed=8)[0]
    oracle = PeftOracle(path, tmp_path, {"mine": {"target_modules": r".*\.(q_proj|down_proj)"}})
    llm = engines(path, **FAST, **{"lora.name": "torch", "lora.max_adapters": 1})
    params = evolve(GREEDY, max_tokens=4)
    for name, last in (("mine", 30), (None, 1)):
        with counted(llm) as seen:
            (output,) = llm.generate([prompt], params, lora_request=oracle.request(name))
        assert output.outputs[0].token_ids == oracle.greedy(name, prompt, 4)
        assert (seen[0][0], seen[-1][0]) == (30, last)


def test_decodes_go_on_beside_prompts_that_want_nothing_yet(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    llm = engines(tiny("gemma3n"), **FAST, **{"scheduler.max_batched_tokens": 8})
    requests = [add(llm, "short", PROMPTS[0])]
    llm.engine.step()
    requests.append(add(llm, "long", PROMPTS[3]))
    with recorded(llm) as schedules, counted(llm) as seen:
        run_all(llm)
    assert schedules[0].num_tokens == 8
    assert (seen[0][0], seen[-1][0]) == (8, 1)
    assert [request.output_token_ids for request in requests] == [
        greedy(tiny("gemma3n"), prompt, 20) for prompt in (PROMPTS[0], PROMPTS[3])
    ]


@pytest.mark.behaviour(74)
def test_drafts_are_wanted_too(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    drafter = {"drafter.name": "ngram", "drafter.tokens": 3, "drafter.ngram.min_tokens": 1, "drafter.adaptive": False}
    llm = engines(tiny("gemma4"), **FAST, **drafter, **{"scheduler.max_batched_tokens": 24})
    prompts = [[5, 6, 7, 8] * 8, *PROMPTS]
    assert tokens_of(llm, prompts) == [greedy(tiny("gemma4"), prompt, 20) for prompt in prompts]
    assert llm.engine.extension("drafts") is not None
    assert llm.engine.extension("drafts").drafting.counts.accepted > 0


def test_text_is_the_same_where_steps_overlap(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    llm = engines(tiny("gemma4"), **FAST, **{"scheduler.async": True, "scheduler.max_batched_tokens": 24})
    for _ in range(2):
        assert tokens_of(llm, PROMPTS) == [greedy(tiny("gemma4"), prompt, 20) for prompt in PROMPTS]


def test_preempted_requests_give_the_same_text(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    llm = engines(tiny("gemma4"), **FAST, memory="92KiB", **{"scheduler.max_batched_tokens": 24})
    outputs = llm.generate(PROMPTS, GREEDY)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [output.outputs[0].token_ids for output in outputs] == [
        greedy(tiny("gemma4"), prompt, 20) for prompt in PROMPTS
    ]


def test_the_layers_have_backends_of_their_own_and_explain_says_so(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("gemma3n"), **FAST)
    assert [(group.name, [layer.index for layer in group.layers], group.fast_prefill) for group in llm.plan.groups] == [
        ("sliding", [0, 2], False),
        ("full", [1], False),
        ("full_1", [3, 5], True),
        ("sliding_1", [4], True),
    ]
    assert [len(group.layers) for group in llm.plan.cache_groups] == [2, 1]
    text = llm.plan.explain()
    assert text.count("runs only for the tokens whose logits are wanted") == 2
    assert "cache.kv_sharing_fast_prefill" in text
    off = engines(tiny("gemma3n"), block_size=4).plan.explain()
    assert "3 of 6 layers could leave out unwanted tokens" in off


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("gemma3", {}, "no layer of Gemma3ForCausalLM stands behind the last one"),
        ("bamba", {}, "no layer of BambaForCausalLM stands behind the last one"),
        ("gemma4", {"drafter.name": "eagle"}, "drafter 'eagle' reads hidden states of whole prompts"),
    ],
)
@pytest.mark.behaviour(26)
def test_it_is_refused_with_the_reason(name: str, settings: dict[str, Any], reason: str, tiny: Tiny) -> None:
    with pytest.raises(NegotiationError, match=reason) as error:
        LLM(tiny(name), dtype="float32", **{"cache.kv_sharing_fast_prefill": True, **settings})
    assert "set cache.kv_sharing_fast_prefill = false" in str(error.value)


def test_a_batch_is_cut_down_to_each_requests_last_tokens() -> None:
    """One decode, one chunk in mid-prompt, one prompt's end, one with two drafts."""
    starts = np.array([0, 1, 6, 9, 12])
    indices = np.array([0, 8, 9, 10, 11])
    wanted = FastPrefillBatch.of(starts, indices, torch.from_numpy(indices), torch.from_numpy)
    batch = AttentionBatch(
        num_requests=4,
        num_tokens=12,
        max_query_len=5,
        max_seq_len=30,
        query_start_loc=torch.from_numpy(starts.astype(np.int32)),
        seq_lens=torch.tensor([7, 5, 30, 9], dtype=torch.int32),
        block_table=torch.zeros(4, 8, dtype=torch.int32),
        slot_mapping=torch.arange(100, 112),
        positions=torch.tensor([6, 0, 1, 2, 3, 4, 27, 28, 29, 6, 7, 8]),
        query_start_loc_cpu=starts.astype(np.int32),
        seq_lens_cpu=np.array([7, 5, 30, 9], np.int32),
        num_decodes=1,
        common_prefix_len=4,
    )
    cut = wanted.batch(batch)
    assert cut.query_start_loc_cpu.tolist() == cut.query_start_loc.tolist() == [0, 1, 1, 2, 5]
    assert (cut.num_tokens, cut.max_query_len, cut.num_decodes, cut.common_prefix_len) == (5, 3, 1, 0)
    assert cut.positions.tolist() == [6, 29, 6, 7, 8]
    assert cut.slot_mapping.tolist() == [100, 108, 109, 110, 111]
    assert cut.seq_lens is batch.seq_lens
    everyone = FastPrefillBatch.of(np.array([0, 1, 2]), np.array([0, 1]), torch.tensor([0, 1]), torch.from_numpy)
    assert everyone.num_decodes == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "mode"),
    [("gemma3n", "none"), ("gemma3n", "auto"), ("gemma4", "none"), ("gemma4", "full_decode_only"), ("gemma4", "auto")],
)
@pytest.mark.behaviour(74)
def test_on_a_gpu_prompts_gain_where_no_graph_holds_them(name: str, mode: str, tiny: Tiny, greedy: Greedy) -> None:
    torch.set_float32_matmul_precision("highest")
    options = {"dtype": "float32", "max_model_len": 64, "memory": "64MiB", "scheduler.max_batched_tokens": 24}
    llm = LLM(tiny(name), device="cuda", **options, **FAST, **{"graphs.mode": mode, "observability.progress": False})
    assert {group.backend for group in llm.plan.groups} == {"triton"}
    expected = [greedy(tiny(name), prompt, 20) for prompt in PROMPTS]
    with counted(llm) as seen:
        assert tokens_of(llm, PROMPTS) == expected
    if (name, mode) == ("gemma4", "auto"):  # graphs replay all of it, and have all tokens
        assert seen[-1] == seen[0] == []
    else:
        assert sum(seen[-1]) < sum(seen[0])
    assert tokens_of(llm, PROMPTS) == expected
