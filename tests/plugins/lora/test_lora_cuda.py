"""Adapters on a GPU: the text of PEFT with every plugin, in captured graphs and without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_driver import random_prompts
from lora_cases import PeftOracle, expansions

from slotline.core import LLM, SamplingParams
from slotline.plugins.lora.manager.adapter_use import AdapterUse

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = random_prompts([3, 33, 17, 1, 25, 9])
NAMES = ["first", None, "second", "third", "first", None]


@pytest.fixture(autouse=True)
def exact_matrix_products() -> None:
    """float32 means float32 here, not tf32."""
    torch.set_float32_matmul_precision("highest")


def engine(path: Path, **settings: Any) -> LLM:
    options = {"dtype": "float32", "max_model_len": 64, "max_num_batched_tokens": 24, "memory": "64MiB"}
    options |= {"graphs.sizes": (1, 2, 4, 8, 16, 24), "lora.max_adapters": 2, "lora.max_rank": 8}
    options |= {"observability.check_integrity": True, "observability.progress": False}
    return LLM(model=str(path), device="cuda", **{**options, **settings})


def tokens(llm: LLM, oracle: PeftOracle, names: list[str | None]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, lora_request=[oracle.request(name) for name in names])
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("family", ["llama_deep", "gemma3", "phi3", "qwen3"])
@pytest.mark.behaviour(75, 137, 146)
def test_adapters_swapped_through_two_slots_give_peft_s_text_in_every_graph_mode(family: str, tmp_path: Path) -> None:
    path = tiny_models.build(family, tmp_path / "model", 0)
    oracle = PeftOracle(path, tmp_path / "adapters", {"first": {}, "second": {"r": 8, "use_rslora": True}, "third": {}})
    expected = [oracle.greedy(name, prompt, 10) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    base = [oracle.greedy(None, prompt, 10) for prompt in PROMPTS]
    for plugin, mode, specialize in (
        ("triton", "full_and_piecewise", True),
        ("triton", "full_and_piecewise", False),
        ("triton", "full_decode_only", True),
        ("triton", "none", True),
        ("torch", "full_and_piecewise", True),
    ):
        settings = {"lora.name": plugin, "graphs.mode": mode, "lora.specialize_graphs": specialize}
        llm = engine(path, **settings)
        assert tokens(llm, oracle, NAMES) == expected, settings
        assert tokens(llm, oracle, [None] * len(PROMPTS)) == base, settings
        assert tokens(llm, oracle, NAMES[::-1])[0] == base[0], settings


@pytest.mark.parametrize("family", ["llama_deep", "gemma3"])
def test_adapters_of_the_embedding_and_the_head_give_peft_s_text_in_graphs(family: str, tmp_path: Path) -> None:
    path = tiny_models.build(family, tmp_path / "model", 0)
    targets = ["embed_tokens", "v_proj"] if family == "gemma3" else ["embed_tokens", "lm_head", "v_proj"]
    adapters = {name: {"target_modules": targets} for name in ("first", "second", "third")}
    oracle = PeftOracle(path, tmp_path / "adapters", adapters)
    expected = [oracle.greedy(name, prompt, 10) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    for plugin in ("triton", "torch"):
        llm = engine(path, **{"lora.name": plugin, "lora.target_modules": tuple(targets)})
        assert tokens(llm, oracle, NAMES) == expected, plugin


@pytest.mark.parametrize("family", ["llama_deep", "phi3", "gemma3"])
def test_products_with_adapters_behind_their_weights_give_peft_s_text(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slotline.plugins.lora.segmented import plugin

    monkeypatch.setattr(plugin, "MOST_EXTENDED", 100)
    monkeypatch.setattr(plugin, "FEW_TOKENS", 16)  # prompts are computed without, in part
    path = tiny_models.build(family, tmp_path / "model", 0)
    oracle = PeftOracle(path, tmp_path / "adapters", {"first": {}, "second": {"r": 8, "use_rslora": True}, "third": {}})
    expected = [oracle.greedy(name, prompt, 10) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    base = [oracle.greedy(None, prompt, 10) for prompt in PROMPTS]
    for mode in ("full_and_piecewise", "none"):
        llm = engine(path, **{"lora.name": "triton", "graphs.mode": mode})
        expanded = expansions(llm)
        assert tokens(llm, oracle, NAMES) == expected, mode
        assert tokens(llm, oracle, [None] * len(PROMPTS)) == base, mode
        for name in ("third", "first", "second", "third"):  # alone in a step, from either slot
            names = [None if prompt % 3 == 2 else name for prompt in range(len(PROMPTS))]
            wanted = [oracle.greedy(name, prompt, 10) for prompt, name in zip(PROMPTS, names, strict=True)]
            assert tokens(llm, oracle, names) == wanted, (mode, name)
            assert (
                llm.engine.extension("adapters")._lora._places.index(0)
                == llm.engine.extension("adapters")._known[oracle.request(name).lora_int_id].slot
            )
        llm.engine.runner.model.reload_weights()
        assert tokens(llm, oracle, NAMES[::-1])[0] == base[0], mode
        assert mode != "none" or expanded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_an_output_projection_that_outgrows_the_multiprocessors_is_made_in_parts(dtype: torch.dtype) -> None:
    from slotline.plugins.lora.segmented.plugin import SegmentedLora
    from slotline.plugins.model_families.passes.extended_linear import ExtendedLinear
    from slotline.plugins.model_families.passes.fused_kernels import TritonKernels
    from slotline.plugins.model_families.passes.residuals import FusedResiduals
    from slotline.registry.contracts import LoraContext

    if not 128 <= torch.cuda.get_device_properties(0).multi_processor_count < 136:
        pytest.skip("4,096 outputs fit other cards in another way")
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    linear = torch.nn.Linear(512, 4096, bias=False, device="cuda", dtype=dtype)
    extended = ExtendedLinear(linear, ("o",), 256, 256)
    lora = SegmentedLora(
        LoraContext(
            contract=1,
            modules={"o": (512, 4096)},
            max_adapters=16,
            max_rank=16,
            max_tokens=256,
            device="cuda",
            dtype=str(dtype).removeprefix("torch."),
            extend=lambda names, rows, max_tokens, single_rows: extended.room,
        )
    )
    weights = lora._weights["o",]
    weights.a.copy_(random(*weights.a.shape) / 20)
    weights.b.copy_(random(*weights.b.shape) / 4)
    weights.scales.fill_(0.5)
    slots, inners = torch.arange(64, device="cuda") % 17 - 1, []
    lora.plan(slots)

    def add(names: tuple[str, ...], inputs: torch.Tensor, out: torch.Tensor, inner: torch.Tensor | None = None) -> None:
        inners.append(inner.shape)
        lora.expand(names, inner, out)

    extended.enter(add)
    x, residual = random(1, 64, 512), random(1, 64, 4096)
    total, _ = FusedResiduals(TritonKernels(early=True)).add_and_norm(linear, x, residual, None, None)
    a, b = weights.a[slots.clamp(min=0), 0].float(), weights.b[slots.clamp(min=0)].float()
    share = torch.einsum("tor,tri,ti->to", b, a, x[0].float()) * 0.5 * (slots >= 0)[:, None]
    wanted = residual[0].float() + x[0].float() @ linear.weight.float().T + share
    assert inners == [(3, 64, 256)]
    assert float((total[0].float() - wanted).norm() / wanted.norm()) < 5e-3
    assert float(share.norm() / wanted.norm()) > 0.1


@pytest.mark.behaviour(146)
@pytest.mark.parametrize(("specialize", "captured"), [(True, set(AdapterUse)), (False, {AdapterUse.MANY})])
def test_graphs_are_captured_without_adapters_with_one_and_with_many_or_with_many_alone(
    specialize: bool, captured: set[AdapterUse], tmp_path: Path
) -> None:
    path = tiny_models.build("llama_deep", tmp_path / "model", 0)
    llm = engine(path, **{"lora.name": "triton", "lora.specialize_graphs": specialize})
    assert {shape.variant for shape in llm.engine.graphs.shapes.largest_first} == captured
    oracle = PeftOracle(path, tmp_path / "adapters", {"first": {}, "second": {}})
    used, graphs = [], llm.engine.graphs
    original = graphs.replay

    def remember(inputs: Any) -> Any:
        used.append((inputs.shape.query_len, inputs.shape.variant))
        return original(inputs)

    graphs.replay = remember
    base = tokens(llm, oracle, [None] * len(PROMPTS))
    assert base == [oracle.greedy(None, prompt, 10) for prompt in PROMPTS]
    none, one, many = AdapterUse if specialize else [AdapterUse.MANY] * 3
    assert set(used) == {(0, none), (1, none)}
    used.clear()
    tokens(llm, oracle, ["first", None] * (len(PROMPTS) // 2))
    assert set(used) == {(0, many), (1, one)}
    used.clear()
    llm.generate(
        PROMPTS[:2], SamplingParams(max_tokens=4), lora_request=[oracle.request("first"), oracle.request("second")]
    )
    assert {(0, many), (1, many)} <= set(used)  # the one that ends last is alone then


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_merged_adapter_and_one_in_a_slot_score_tokens_alike(dtype: str, tmp_path: Path) -> None:
    path = tiny_models.build("llama_deep", tmp_path / "model", 0)
    oracle = PeftOracle(path, tmp_path / "adapters", {"first": {"lora_alpha": 1}})
    found = []
    for merge in (False, True):
        llm = engine(path, dtype=dtype, **{"lora.name": "triton", "lora.merge": merge})
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([PROMPTS[1]], params, lora_request=oracle.request("first"))
        entries = zip(output.prompt_logprobs[1:], PROMPTS[1][1:], strict=True)
        found.append(torch.tensor([entry[token].logprob for entry, token in entries]))
    scores = oracle.logits("first", PROMPTS[1])[:-1].log_softmax(-1)
    exact = scores.gather(1, torch.tensor(PROMPTS[1][1:])[:, None])[:, 0]
    for values in found:
        assert float((values - exact).abs().mean()) < 0.1


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    "pipeline", [("cuda:0", "cuda:0"), pytest.param(("cuda:0", "cuda:1"), marks=two_gpus)], ids=["same", "both"]
)
def test_adapters_over_stages_give_peft_s_text(pipeline: tuple[str, ...], tmp_path: Path) -> None:
    path = tiny_models.build("llama_deep", tmp_path / "model", 0)
    targets = ["embed_tokens", "lm_head", "q_proj", "v_proj", "down_proj"]
    adapters = {name: {"target_modules": targets} for name in ("first", "second", "third")}
    oracle = PeftOracle(path, tmp_path / "adapters", adapters)
    expected = [oracle.greedy(name, prompt, 10) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    alone = [oracle.greedy("second", prompt, 10) for prompt in PROMPTS]
    for plugin in ("triton", "torch"):
        settings = {"lora.name": plugin, "lora.target_modules": tuple(targets), "parallel.pipeline": pipeline}
        llm = engine(path, **settings)
        assert [part.device for part in llm.engine.extension("adapters")._lora._parts] == list(pipeline)
        assert tokens(llm, oracle, NAMES) == expected, plugin
        assert tokens(llm, oracle, ["second"] * len(PROMPTS)) == alone, plugin
