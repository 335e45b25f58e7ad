"""The passes with a GPU's fused kernels, interpreted on the CPU: the same results, and what each family gets fused."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from torch import nn

from tests.plugins.model_families.test_passes import CONFIGS, MOE, build, causal_attention, difference, logits

pytest.importorskip("triton")

from slotline.plugins.model_families import binding, saved_model
from slotline.plugins.model_families.chain import run_layers
from slotline.plugins.model_families.passes import fused_kernels, residuals
from slotline.plugins.model_families.passes.decisions import Decisions
from slotline.plugins.model_families.passes.fused_kernels import TritonKernels
from slotline.plugins.model_families.passes.lean_attention import LeanForward
from slotline.plugins.model_families.passes.lean_layer import LeanLayer
from slotline.plugins.model_families.passes.lean_mlp import LeanMLP
from slotline.plugins.model_families.passes.pipeline import apply_passes
from slotline.plugins.model_families.passes.rms_norm import KernelRMSNorm
from slotline.plugins.model_families.passes.target import Target
from slotline.registry.contracts.attention import AttentionLayer, CacheSlots, KVCache

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_passes_cuda.py runs the compiled kernels")
__all__ = ["causal_attention"]  # the fixture is used by every test here

KERNELS = TritonKernels()
TARGET = Target("cuda", torch.float32, KERNELS, KERNELS)


@pytest.fixture(autouse=True)
def products_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, the product of one row takes seconds a model; test_fused_kernels.py proves it."""
    monkeypatch.setattr(fused_kernels, "PRODUCT_ROWS", 0)


def fused(family: str) -> Any:
    model = build(family)
    apply_passes(model, TARGET)
    return model


fused_once = cache(fused)
"""For tests that leave the model as they found it."""


def forwards(model: Any, kind: type) -> int:
    return sum(type(module.__dict__.get("forward")) is kind for module in model.modules())


@pytest.mark.spread(7)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_fused_model_gives_the_logits_of_the_untouched_one(family: str) -> None:
    model, plain = fused_once(family), build(family)
    for num_tokens in (1, 5):
        assert difference(logits(model, num_tokens), logits(plain, num_tokens)) <= 1e-5, num_tokens


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2", "qwen2"])
def test_one_token_takes_products_that_norm_and_add_themselves(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = fused_once(family), build(family)
    monkeypatch.setattr(fused_kernels, "PRODUCT_ROWS", 1)
    assert difference(logits(model, 1), logits(plain, 1)) <= 1e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_every_layer_of_every_family_gets_the_fused_passes_made_for_it(family: str) -> None:
    model = fused_once(family)
    assert not any("RMSNorm" in type(m).__name__ and type(m) is not KernelRMSNorm for m in model.modules())
    assert forwards(model, LeanForward) == 2
    dense = 0 if family in MOE else 2
    assert forwards(model, LeanMLP) == dense
    assert forwards(model, LeanLayer) == dense


@pytest.mark.parametrize("family", ["llama_tied", "gemma3", "gpt_oss"])
def test_passes_are_repeated_without_checks_on_a_model_without_weights(family: str) -> None:
    first, again = build(family), build(family)
    origin = saved_model.origin_of(first, "float32")
    notes = apply_passes(first, evolve(TARGET, decisions=origin.decisions))
    saved_model.hollow(again, origin.tied, origin.dtypes, "float32")
    known = Decisions(json.loads(json.dumps(origin.decisions.answers)), known=True)
    assert apply_passes(again, evolve(TARGET, decisions=known)) == notes
    known.finish()
    tensors = dict(first.named_parameters()) | dict(first.named_buffers())
    for name, (module, own, empty) in saved_model.empty_places(again):
        saved_model.put(module, own, empty, tensors[name].detach().clone())
    assert not any(tensor.is_meta for tensor in again.state_dict().values())
    assert torch.equal(logits(again, 5), logits(first, 5))


class StoringAttend:
    """An attend whose cache the model may write to; it keeps what it was called with, and passes queries on."""

    def __init__(self, dtype: torch.dtype, slot_mapping: torch.Tensor) -> None:
        self.cache = KVCache(*torch.full((2, 4, 4, 2, 16), torch.nan, dtype=dtype))
        self.slot_mapping = slot_mapping
        self.calls: list[tuple[torch.Tensor, torch.Tensor, bool]] = []

    def slots(self, _: AttentionLayer, key: torch.Tensor) -> CacheSlots | None:
        return CacheSlots(self.cache, self.slot_mapping) if key.dtype == self.cache.key.dtype else None

    def __call__(
        self, _: AttentionLayer, query: Any, key: Any, value: Any, sinks: Any, *, written: bool = False
    ) -> Any:
        self.calls.append((key.clone(), value.clone(), written))
        return query.clone()


@pytest.mark.parametrize("family", ["qwen3", "llama", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_and_values_are_stored_where_the_step_says_or_left_to_the_backend(family: str, dtype: torch.dtype) -> None:
    model = fused(family)
    binding.register(binding.ATTENTION_NAME, binding.slot_attention)
    model.config._attn_implementation = binding.ATTENTION_NAME
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "head_size_v": 16, "scale": 1.0}
    layers = [AttentionLayer(name=f"model.layers.{i}.self_attn", index=i, **shape) for i in range(2)]
    holder = binding.bind(model, layers)
    holder.attend = attend = StoringAttend(dtype, torch.tensor([5, -1, 12]))
    model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    stores = dtype == torch.float32 and family != "olmo2"  # whose norms go over all heads
    assert [written for *_, written in attend.calls] == [stores] * 2
    for stored, new in zip(attend.cache, attend.calls[-1], strict=False):
        flat = stored.view(16, 2, 16)
        assert torch.equal(flat[[5, 12]], new[[0, 2]]) == stores
        assert int(flat.isnan().all((1, 2)).sum()) == (14 if stores else 16)


@pytest.mark.parametrize("family", ["qwen3", "llama_tied"])
def test_logits_of_half_precision_are_float32_and_not_rounded(family: str) -> None:
    model = build(family, torch.float16)
    notes = apply_passes(model, Target("cuda", torch.float16, KERNELS, KERNELS))
    assert "logits in float32 without rounding" in notes
    hidden = torch.randn(1, 3, 64).half()
    found = model.lm_head(hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, hidden.float() @ model.lm_head.weight.float().T, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3"])
def test_a_layer_leaves_its_input_as_it_was(family: str) -> None:
    model = fused_once(family)
    seen = []
    handles = [
        layer.register_forward_pre_hook(lambda _, args: seen.append((args[0], args[0].clone())))
        for layer in model.model.layers
    ]
    logits(model, 5)
    for handle in handles:
        handle.remove()
    assert len(seen) == 2
    assert all(torch.equal(now, before) for now, before in seen)


@pytest.mark.parametrize(
    "name", ["", "self_attn", "mlp", "input_layernorm", "self_attn.o_proj", "self_attn.k_proj", "self_attn.q_norm",
             "mlp.down_proj", "mlp.up_proj"]
)  # fmt: skip
def test_hooks_put_on_a_fused_model_are_called(name: str) -> None:
    model = fused_once("qwen3")
    expected = logits(build("qwen3"), 3)
    seen: list[str] = []
    handle = model.model.layers[1].get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    assert difference(logits(model, 3), expected) <= 1e-5
    assert seen == [name]
    handle.remove()
    logits(model, 3)
    assert seen == [name]


@pytest.mark.parametrize("name", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_hooks_put_on_projections_that_come_merged_are_called(name: str) -> None:
    model = fused_once("phi3")
    seen: list[str] = []
    handle = model.model.layers[1].get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    assert difference(logits(model, 3), logits(build("phi3"), 3)) <= 1e-5
    handle.remove()
    assert seen == [name]


@pytest.mark.spread(5, slow=1)
@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_the_short_forwards_are_left_when_an_adapter_replaces_a_projection(family: str, name: str) -> None:
    class Shifted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) * 2 + 1  # type: ignore[no-any-return]

    model, plain = fused(family), build(family)
    for each in (model, plain):
        parent, _, child = name.partition(".")
        module = each.model.layers[0].get_submodule(parent)
        setattr(module, child, Shifted(getattr(module, child)))
    assert difference(logits(model, 5), logits(plain, 5)) <= 1e-5
    assert difference(logits(model, 5), logits(build(family), 5)) > 1e-2


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu", "relu", "quick_gelu"])
def test_the_activation_is_found_by_its_values(activation: str) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=97,
            hidden_act=activation,
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)

    changed = model()
    apply_passes(changed, TARGET)
    assert forwards(changed, LeanMLP) == (activation != "quick_gelu")
    assert difference(logits(changed, 5), logits(model(), 5)) <= 1e-5


def test_weights_reload_by_copying_from_a_freshly_fused_model() -> None:
    first, second = build("qwen3"), build("qwen3")
    for parameter in second.parameters():
        parameter.mul_(1.5)
    expected = logits(second, 5)
    for model in (first, second):
        apply_passes(model, TARGET)
    new = dict(second.named_parameters()) | dict(second.named_buffers())
    for name, tensor in (dict(first.named_parameters()) | dict(first.named_buffers())).items():
        tensor.copy_(new[name])
    assert difference(logits(first, 5), expected) <= 1e-5


@pytest.mark.spread(3)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2", "mixtral"])
@pytest.mark.parametrize("hooked", [None, "layers.0", "layers.1", "layers.1.input_layernorm", "norm"])
def test_layers_in_a_chain_give_what_they_give_one_by_one(family: str, hooked: str | None) -> None:
    model = fused_once(family)
    base = model.model
    if hooked is not None and "input_layernorm" in hooked and family == "olmo2":
        pytest.skip("it has no such norm")
    hidden, positions, index = torch.randn(1, 6, 64), torch.arange(6)[None], torch.tensor([5, 2])
    embeddings = []
    for layer in base.layers:
        by_type = (layer.self_attn.layer_type,) if family == "gemma3" else ()
        embeddings.append(base.rotary_emb(hidden, positions, *by_type))
    expected = hidden
    for layer, embedding in zip(base.layers, embeddings, strict=True):
        expected = layer(expected, position_embeddings=embedding)
    narrowed = base.norm(expected[:, index])
    seen: list[int] = []
    handle = None
    if hooked is not None:
        handle = base.get_submodule(hooked).register_forward_pre_hook(lambda *_: seen.append(1))
    found = run_layers(list(base.layers), embeddings, hidden)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found = run_layers(list(base.layers), embeddings, hidden, base.norm, index)
    torch.testing.assert_close(found, narrowed, atol=1e-5, rtol=1e-5)
    if handle is not None:
        handle.remove()
        assert len(seen) == (2 if hooked != "norm" else 1)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_the_attention_of_many_tokens_is_added_to_a_chains_residual_in_place(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fused_once(family)
    base, layer = model.model, model.model.layers[0]
    hidden, positions = torch.randn(1, 6, 64), torch.arange(6)[None]
    by_type = (layer.self_attn.layer_type,) if family == "gemma3" else ()
    embeddings = base.rotary_emb(hidden, positions, *by_type)
    expected, before = layer(hidden, position_embeddings=embeddings), hidden.clone()
    monkeypatch.setattr(residuals, "ROWS_BEHIND", 5)
    torch.testing.assert_close(layer(hidden, position_embeddings=embeddings), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(hidden, before)  # outside a chain it is somebody else's
    found, _ = layer.forward.chain(hidden, embeddings, None, base.layers[1].forward.entrance, None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(hidden, before) == (family != "qwen3")  # a norm behind the attention needs the two apart
    apart = before.transpose(1, 2).contiguous().transpose(1, 2)  # rows that do not lie one behind the other
    found, _ = layer.forward.chain(apart, embeddings, None, None, None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_the_last_layer_can_go_on_with_the_wanted_tokens_alone(family: str) -> None:
    model = fused_once(family)
    layer, base = model.model.layers[1], model.model
    hidden, positions = torch.randn(1, 6, 64), torch.arange(6)[None]
    by_type = (layer.self_attn.layer_type,) if family == "gemma3" else ()
    embeddings = base.rotary_emb(hidden, positions, *by_type)
    whole = layer(hidden, position_embeddings=embeddings)
    for wanted in ([1, 4], []):
        index = torch.tensor(wanted, dtype=torch.int64)
        found, _ = layer.forward.chain(hidden, embeddings, None, None, index)
        torch.testing.assert_close(found, whole[:, index], atol=1e-5, rtol=1e-5)
    handle = layer.register_forward_hook(lambda *_: None)
    assert layer.forward.chain(hidden, embeddings, None, None, torch.tensor([1])) is None
    handle.remove()
