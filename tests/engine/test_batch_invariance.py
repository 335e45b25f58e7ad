"""`batch_invariant = true`: a request's log-probabilities are bitwise the same alone and in any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import random_prompts
from lora_cases import PeftOracle
from torch import nn

from slotline.core import LLM, RequestOutput, SamplingParams
from slotline.planner.plan import SMALL_MODEL
from slotline.plugins.model_families.passes import invariant_linear
from slotline.plugins.model_families.passes.target import Target, target_of
from slotline.registry.errors import ModelError, NegotiationError
from slotline.testing.reference import drafter as reference

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
SCORED = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=2)


def bits(output: RequestOutput) -> Any:
    """Tokens and the exact value of every log-probability."""
    scored = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
    values = [None if entry is None else [(t, found.logprob.hex()) for t, found in entry.items()] for entry in scored]
    return output.outputs[0].token_ids, values


def alone(llm: LLM, prompts: Sequence[list[int]]) -> list[Any]:
    """Each prompt by itself, on an empty prefix cache."""
    found = []
    for prompt in prompts:
        llm.engine.scheduler.cache.pool.reset()
        found.append(bits(llm.generate([prompt], SCORED)[0]))
    return found


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma3", "float32"), ("gemma2", "float32")]
)
def test_a_requests_numbers_are_bitwise_the_same_alone_and_in_a_batch(
    family: str, dtype: str, tiny: Tiny, engines: Engines
) -> None:
    """Chunked prompts beside decodes, prefix hits, and a pool so small that requests are preempted and start anew."""
    settings = {"backend": "cpu", "optimize": True, "dtype": dtype, "block_size": 4, "batch_invariant": True}
    wide = engines(tiny(family), **settings, **{"scheduler.max_batched_tokens": 24})
    narrow = engines(tiny(family), memory="100KiB" if dtype == "float32" else "50KiB", **settings)
    expected = alone(wide, PROMPTS)
    together = wide.generate(PROMPTS, SCORED)
    assert [bits(output) for output in together] == expected
    assert [bits(output) for output in wide.generate(PROMPTS, SCORED)] == expected  # over cached prefixes
    pressed = narrow.generate(PROMPTS, SCORED)
    assert sum(output.metrics.num_preemptions for output in pressed) > 0
    assert [bits(output) for output in pressed] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tiled_product_gives_a_row_the_same_bits_among_any_number_of_rows(dtype: torch.dtype) -> None:
    """3,072 inputs: there the library's own product for one row differs from that for two on common machines."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3072, 768, bias=True, dtype=dtype))
    x = torch.randn(40, 3072).to(dtype)
    plain = model(x)
    invariant_linear.apply(model, target_of("cpu", dtype))
    whole = model(x)
    assert torch.allclose(whole.float(), plain.float(), rtol=2e-2, atol=2e-2)
    for start, end in ((0, 1), (7, 8), (3, 20), (39, 40), (0, 33), (5, 5)):
        assert torch.equal(model(x[start:end]), whole[start:end])
    assert model(x[None]).shape == (1, 40, 768)


def test_what_cannot_hold_it_is_refused_with_every_reason(tiny: Tiny) -> None:
    with pytest.raises(NegotiationError) as found:
        LLM(tiny("llama"), device="cpu", batch_invariant=True, backend="torch")
    assert "N175" in str(found.value)
    assert "batch_invariant = false" in str(found.value)
    with pytest.raises(NegotiationError, match=r"optimize = false.*; offload_gib = 1"):
        LLM(tiny("llama"), device="cpu", batch_invariant=True, optimize=False, offload_gib=1.0)
    with pytest.raises(ModelError, match=r"Qwen3MoeExperts.* multiply weights in a way that hangs on"):
        LLM(tiny("qwen3_moe"), device="cpu", batch_invariant=True)
    drafter = {"plugins.inline": (f"{reference.__file__}:probabilistic",), "drafter.name": "reference_pair_counts"}
    with pytest.raises(NegotiationError, match="its guesses' probabilities decide what is sampled"):
        LLM(tiny("llama"), device="cpu", batch_invariant=True, **drafter)


def test_drafts_change_no_bit(engines: Engines) -> None:
    settings = {"backend": "cpu", "optimize": True, "dtype": "float32", "batch_invariant": True, "max_model_len": 64}
    prompts: list[Any] = ["def read_file(path", "for i in range(10):\n    print(i)\nfor i in"]
    expected = alone(engines(SMALL_MODEL, **settings), prompts)
    drafting = engines(
        SMALL_MODEL, **settings, **{"drafter.name": "eagle", "drafter.tokens": 3, "drafter.adaptive": False}
    )
    assert [bits(output) for output in drafting.generate(prompts, SCORED)] == expected
    assert drafting.engine.extension("drafts") is not None
    assert drafting.engine.extension("drafts").drafting.counts.accepted > 0


def test_a_gpu_without_kernels_is_refused() -> None:
    with pytest.raises(ModelError, match="no kernels of fixed sizes"):
        invariant_linear.apply(nn.Sequential(nn.Linear(4, 4)), Target("cuda", torch.float32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", ["none", "auto"])
def test_the_same_on_a_gpu_with_graphs_and_asynchronous_scheduling(graphs: str, dtype: str, tiny: Tiny) -> None:
    options: dict[str, Any] = {"dtype": dtype, "batch_invariant": True, "graphs.mode": graphs, "max_model_len": 128}
    llm = LLM(tiny("llama"), device="cuda", memory="64MiB", max_num_batched_tokens=24, **options)
    assert {group.backend for group in llm.plan.groups} == {"triton"}
    expected = alone(llm, PROMPTS)
    assert [bits(output) for output in llm.generate(PROMPTS, SCORED)] == expected
    assert [bits(output) for output in llm.generate(PROMPTS[::-1], SCORED)] == expected[::-1]


ADAPTED = {"lora.max_adapters": 2, "lora.max_rank": 8}
ADAPTERS: list[str | None] = ["first", None, "second", "first", "second", None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_change_no_other_request_s_bits(dtype: str, tiny: Tiny, engines: Engines, tmp_path: Path) -> None:
    path = tiny("llama")
    oracle = PeftOracle(path, tmp_path, {"first": {}, "second": {"r": 8, "use_rslora": True}})
    settings = {"backend": "cpu", "optimize": True, "dtype": dtype, "block_size": 4, "batch_invariant": True}
    llm = engines(path, **settings, **ADAPTED, **{"lora.name": "torch", "scheduler.max_batched_tokens": 24})
    requests = [oracle.request(name) for name in ADAPTERS]
    expected = []
    for prompt, request in zip(PROMPTS, requests, strict=True):
        llm.engine.scheduler.cache.pool.reset()
        expected.append(bits(llm.generate([prompt], SCORED, lora_request=request)[0]))
    plain = [bits(output) for output in llm.generate(PROMPTS, SCORED)]
    assert [found == base for found, base in zip(expected, plain, strict=True)] == [name is None for name in ADAPTERS]
    for order in (1, -1):
        outputs = llm.generate(PROMPTS[::order], SCORED, lora_request=requests[::order])
        assert [bits(output) for output in outputs] == expected[::order]


def test_an_adapter_in_the_weights_changes_no_bit_with_the_batch(tiny: Tiny, engines: Engines, tmp_path: Path) -> None:
    path = tiny("llama")
    oracle = PeftOracle(path, tmp_path, {"first": {}})
    settings = {"backend": "cpu", "optimize": True, "dtype": "float32", "batch_invariant": True, "lora.name": "torch"}
    merged = engines(path, **settings, **ADAPTED, **{"lora.merge": True})
    merged.add_lora(oracle.request("first"))
    found = []
    for prompts in ([PROMPTS[1]], PROMPTS):
        outputs = merged.generate(prompts, SCORED, lora_request="first")
        found.append([bits(output) for output in outputs])
    assert found[0][0] == found[1][1]
    greedy = SamplingParams(temperature=0, max_tokens=6)
    (output,) = merged.generate([PROMPTS[1]], greedy, lora_request="first")
    assert list(output.outputs[0].token_ids) == oracle.greedy("first", PROMPTS[1], 6)
    assert merged.remove_lora(1)
    (output,) = merged.generate([PROMPTS[1]], greedy)
    assert list(output.outputs[0].token_ids) == oracle.greedy(None, PROMPTS[1], 6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("plugin", ["triton", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_change_no_other_request_s_bits_on_a_gpu(plugin: str, dtype: str, tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("llama")
    oracle = PeftOracle(path, tmp_path, {"first": {}, "second": {"r": 8, "use_rslora": True}})
    options = {"dtype": dtype, "batch_invariant": True, "max_model_len": 128, "lora.name": plugin, **ADAPTED}
    llm = LLM(path, device="cuda", memory="64MiB", max_num_batched_tokens=24, **options)
    requests = [oracle.request(name) for name in ADAPTERS]
    expected = []
    for prompt, request in zip(PROMPTS, requests, strict=True):
        llm.engine.scheduler.cache.pool.reset()
        expected.append(bits(llm.generate([prompt], SCORED, lora_request=request)[0]))
    for order in (1, -1):
        outputs = llm.generate(PROMPTS[::order], SCORED, lora_request=requests[::order])
        assert [bits(output) for output in outputs] == expected[::order]
