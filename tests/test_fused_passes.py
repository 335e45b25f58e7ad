"""The passes with a GPU's fused kernels, interpreted on the CPU: the same results, and what each family gets fused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from test_passes import CONFIGS, MOE, build, causal_attention, difference, logits
from torch import nn

pytest.importorskip("triton")

from slotline.plugins.model_families.passes import fused_kernels
from slotline.plugins.model_families.passes.fused_kernels import TritonKernels
from slotline.plugins.model_families.passes.lean_attention import LeanForward
from slotline.plugins.model_families.passes.lean_layer import LeanLayer
from slotline.plugins.model_families.passes.lean_mlp import LeanMLP
from slotline.plugins.model_families.passes.pipeline import apply_passes
from slotline.plugins.model_families.passes.rms_norm import KernelRMSNorm
from slotline.plugins.model_families.passes.target import Target

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


@pytest.mark.parametrize("family", CONFIGS)
def test_a_fused_model_gives_the_logits_of_the_untouched_one(family: str) -> None:
    model, plain = fused_once(family), build(family)
    for num_tokens in (1, 5):
        assert difference(logits(model, num_tokens), logits(plain, num_tokens)) <= 1e-5, num_tokens


@pytest.mark.parametrize("family", CONFIGS)
def test_every_layer_of_every_family_gets_the_fused_passes_made_for_it(family: str) -> None:
    model = fused_once(family)
    assert not any("RMSNorm" in type(m).__name__ and type(m) is not KernelRMSNorm for m in model.modules())
    assert forwards(model, LeanForward) == 2
    dense = 0 if family in MOE else 2
    assert forwards(model, LeanMLP) == dense
    assert forwards(model, LeanLayer) == dense


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
        found = layer.forward.narrow(hidden, embeddings, index)
        torch.testing.assert_close(found, whole[:, index], atol=1e-5, rtol=1e-5)
    handle = layer.register_forward_hook(lambda *_: None)
    assert layer.forward.narrow(hidden, embeddings, torch.tensor([1])) is None
    handle.remove()
