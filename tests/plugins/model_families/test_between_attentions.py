"""The kernel between two attentions on Hopper: what it computes, by its source on an emulator, and that it compiles."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from slotline.kernels import nvrtc as cuda_kernels
from slotline.plugins.model_families.chain import run_layers
from slotline.plugins.model_families.passes import between_attentions, fused_kernels, layer_link, products
from slotline.plugins.model_families.passes.between_attentions import Sizes, form_of, source
from slotline.plugins.model_families.passes.cuda_sources import ACTIVATIONS
from slotline.plugins.model_families.passes.equality import relative_difference
from slotline.plugins.model_families.passes.fused_kernels import TritonKernels
from slotline.plugins.model_families.passes.kernels import LayerWeights, NormWeight
from slotline.plugins.model_families.passes.pipeline import apply_passes
from slotline.plugins.model_families.passes.target import Target
from tests.plugins.model_families.test_cluster_products import H200, cuobjdump
from tests.plugins.model_families.test_passes import build, causal_attention
from tests.support.emulated_between import EmulatedBetween

__all__ = ["causal_attention"]  # the fixture is used by tests of models
QWEN = Sizes(1024, 2048, 3072, 4096)  # of Qwen3-0.6B
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.relu,
}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def random_weights(sizes: Sizes, activation: str = "silu", *, bias: bool = False, offset: float = 0.0) -> LayerWeights:
    generator = torch.Generator().manual_seed(sum(sizes))

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(shape[-1] ** -0.5).bfloat16()

    def norm(eps: float) -> NormWeight:
        return NormWeight((1 - offset + torch.rand(sizes.hidden, generator=generator)).bfloat16(), eps, offset)

    return LayerWeights(
        some(sizes.hidden, sizes.attended),
        norm(1e-6),
        some(2 * sizes.inner, sizes.hidden),
        some(sizes.hidden, sizes.inner),
        norm(1e-5),
        some(sizes.qkv, sizes.hidden),
        some(1, sizes.qkv)[0] * 30 if bias else None,
        activation,
    )


def reference(attended: torch.Tensor, residual: torch.Tensor, weights: LayerWeights) -> tuple[torch.Tensor, ...]:
    """In float32, rounded where rows leave a multiprocessor or are normed."""

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.float() @ weight.float().T

    def normed(x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
        factors = norm.offset + norm.weight.float()
        return torch.nn.functional.rms_norm(x.float(), factors.shape, factors, norm.eps).bfloat16()

    middle = (product(attended, weights.o) + residual).bfloat16()
    gate, up = product(normed(middle, weights.norm), weights.gate_up).chunk(2, -1)
    out = (product((FUNCTIONS[weights.activation](gate) * up).bfloat16(), weights.down) + middle).bfloat16()
    qkv = product(normed(out, weights.next_norm), weights.qkv)
    return out, (qkv if weights.bias is None else qkv + weights.bias).bfloat16()


@needs_compiler
@pytest.mark.parametrize(
    ("sizes", "rows", "blocks", "stages", "activation"),
    [
        (Sizes(256, 256, 64, 72), (3, 16), 3, 4, "silu"),
        (Sizes(96, 64, 320, 40), (17,), 4, 3, "gelu_tanh"),  # elements that eight warps cannot share alike
        pytest.param(Sizes(64, 1056, 2080, 64), (9, 25), 4, 2, "relu", marks=pytest.mark.slow),  # rows in segments
    ],
)
def test_its_source_computes_what_separate_kernels_do(
    sizes: Sizes, rows: tuple[int, ...], blocks: int, stages: int, activation: str, tmp_path: Path
) -> None:
    between = EmulatedBetween(blocks, tmp_path, stages)
    weights = random_weights(sizes, activation, bias=activation != "silu", offset=float(activation != "silu"))
    for count in rows:
        attended, residual = torch.randn(count, sizes.attended).bfloat16(), torch.randn(count, sizes.hidden).bfloat16()
        found = between(attended, residual, weights)
        expected = reference(attended, residual, weights)
        for one, other in zip(found, expected, strict=True):
            assert relative_difference(one, other) <= 8e-3, count
    again = between(attended, residual, weights)  # with a counter that goes on, threads in another order
    assert all(map(torch.equal, found, again))


@needs_compiler
@pytest.mark.parametrize(
    ("family", "joins"),
    [
        ("qwen3", True),
        pytest.param("qwen3", False, marks=pytest.mark.slow),
        pytest.param("gemma3", True, marks=pytest.mark.slow),  # whose branches are normed
    ],
)
def test_layers_of_a_model_are_linked_where_one_kernel_gives_the_same(
    family: str, joins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(between_attentions, "FILLED", 0.0)
    monkeypatch.setattr(products, "DOT_ROWS", 0)  # Triton's interpreter has no products of bfloat16
    monkeypatch.setattr(fused_kernels, "PRODUCT_ROWS", 0)
    monkeypatch.setattr(layer_link, "PROBE_ROWS", (3,))
    between = EmulatedBetween(2, tmp_path)
    kernels = TritonKernels(between=between)
    model = build(family, torch.bfloat16)
    notes = apply_passes(model, Target("cuda", torch.bfloat16, kernels, kernels, joins=joins))
    linked = [note for note in notes if note.startswith("one kernel between two attentions after 1 layers")]
    assert len(linked) == between.launched.count(3) == (family == "qwen3" and joins)
    if not linked:
        assert all(layer.forward.link is None for layer in model.model.layers)
        return
    base, first = model.model, model.model.layers[0]
    hidden, positions = torch.randn(1, 9, 64).bfloat16(), torch.arange(9)[None]
    cos, sin = base.rotary_emb(hidden, positions)

    def run(count: int = 5, layers: int = 2) -> torch.Tensor:
        embeddings = [(cos[:, :count], sin[:, :count])] * layers
        return run_layers(list(base.layers[:layers]), embeddings, hidden[:, :count], base.norm)

    found = run()
    assert between.launched == [3, 5]
    with monkeypatch.context() as context:
        context.setattr(first.forward, "link", None)
        expected = run()
    assert relative_difference(found, expected) <= 2e-2
    run(layers=1)  # without the layer behind
    run(count=9)
    for module in (first.mlp.down_proj, first.post_attention_layernorm, base.layers[1]):
        handle = module.register_forward_pre_hook(lambda *_: None)
        assert relative_difference(run(), expected) <= 2e-2
        handle.remove()
    assert between.launched == [3, 5]


def test_what_it_takes() -> None:
    assert form_of(QWEN, 16, H200, has_bias=False, has_offset=False).stages == 12
    assert QWEN.filled(H200) >= 0.96
    weights = random_weights(Sizes(64, 64, 64, 64))
    assert not between_attentions.fits(weights, H200)  # eight tiles for 132 blocks
    assert between_attentions.fits(weights, 8)
    assert not between_attentions.fits(random_weights(Sizes(64, 72, 64, 64)), 8)
    assert not between_attentions.fits(random_weights(Sizes(1056, 64, 64, 64)), 8)


@pytest.mark.skipif(cuda_kernels.why_no_cuda_sources() is not None, reason="needs cuda-bindings and NVRTC")
@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_compiles_with_all_in_registers(dtype: torch.dtype, rows: int, tmp_path: Path) -> None:
    form = form_of(QWEN, rows, H200, has_bias=False, has_offset=False)
    assert form.shared_bytes <= 227 * 1024
    image = cuda_kernels._compile(source(form, dtype, next(iter(ACTIVATIONS))), [b"-arch=sm_90a", b"-std=c++17"])
    (tmp_path / "image").write_bytes(image)
    usage = cuobjdump("-res-usage", tmp_path / "image")
    assert re.search(r"STACK:0 .*LOCAL:0 ", usage), usage
