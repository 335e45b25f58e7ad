"""Products of some tens to some hundreds of rows on Hopper: the library's results, whatever rows, sizes, activation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from slotline.kernels.nvrtc import why_no_cuda_sources

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9 or why_no_cuda_sources() is not None:
    pytest.skip("made for Hopper, compiled by NVRTC", allow_module_level=True)

from slotline.plugins.model_families.passes import cluster_products
from slotline.plugins.model_families.passes.cluster_products import ClusterProducts
from slotline.plugins.model_families.passes.fused_kernels import triton_kernels_for

ROWS = (33, 64, 65, 128, 129, 191, 192, 193, 250, 256)
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
    "relu": functional.relu,
}


def tensors(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(1, rows, k, device="cuda").to(dtype)
    return x, (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> ClusterProducts:
    """As on the device, for weights of any size."""
    monkeypatch.setattr(cluster_products, "LARGE_WEIGHT", 1)
    monkeypatch.setattr(cluster_products, "FILLED", 0.0)
    count = torch.cuda.get_device_properties("cuda").multi_processor_count
    return ClusterProducts(early=True, multiprocessors=count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", ROWS)
def test_gate_and_up_are_activated_where_they_are_made(
    rows: int, activation: str, dtype: torch.dtype, products: ClusterProducts
) -> None:
    for n, k in ((14336, 4096) if activation == "silu" else (4096, 64), (40, 64), (1288, 192), (17408, 128)):
        x, weight = tensors(rows, 2 * n, k, dtype)
        gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
        assert products.suits(x, weight, None, "gated", activation)
        found = products.dot(x, weight, "gated", activation)
        assert found.shape == (1, 1, rows, n)
        assert found.dtype == dtype
        assert far(found[0], ACTIVATIONS[activation](gate) * up) < 0.006


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
def test_parts_are_float32_and_add_up(rows: int, dtype: torch.dtype, products: ClusterProducts) -> None:
    for n, k in ((4096, 14336), (128, 2048), (448, 1024), (33024, 1024)):
        x, weight = tensors(rows, n, k, dtype)
        assert products.suits(x, weight, None, "parts")
        found = products.dot(x, weight, "parts")
        parts = len(found)
        assert found.shape == (parts, 1, rows, n)
        assert found.dtype == (torch.float32 if parts > 1 else dtype)
        assert far(found.double().sum(0), x.double() @ weight.double().t()) < (1e-5 if parts > 1 else 0.004)


@pytest.mark.parametrize("rows", [33, 100, 192])
def test_a_head_is_float32_and_whole(rows: int, products: ClusterProducts) -> None:
    for n, k in ((128256, 4096), (1000, 256)):
        x, weight = tensors(rows, n, k, torch.bfloat16)
        assert products.suits(x, weight, None, "floats")
        found = products.dot(x, weight, "floats")
        assert found.shape == (1, 1, rows, n)
        assert found.dtype == torch.float32
        assert far(found[0], x.double() @ weight.double().t()) < 1e-5


@pytest.mark.parametrize("rows", [100, 150, 256])
def test_nothing_is_read_or_written_outside_of_what_was_given(rows: int, products: ClusterProducts) -> None:
    x, weight = tensors(rows, 2 * 1288, 192, torch.bfloat16)
    assert products.suits(x, weight, None, "gated", "silu")
    inside = torch.full((1, rows + 64, 192), torch.nan, device="cuda", dtype=x.dtype)
    inside[:, :rows] = x
    around = torch.full((2 * 1288 + 256, 192), torch.nan, device="cuda", dtype=x.dtype)
    around[: 2 * 1288] = weight
    expected = products.dot(x, weight, "gated", "silu")
    found = products.dot(inside[:, :rows], around[: 2 * 1288], "gated", "silu")
    assert torch.equal(found, expected)
    held = torch.full((1, 1, 3 * rows, 1288), 7.0, device="cuda", dtype=x.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda *_, **__: held[:, :, rows : 2 * rows])
        products.dot(x, weight, "gated", "silu")
    assert torch.equal(held[:, :, rows : 2 * rows], expected)
    assert bool((held[:, :, :rows] == 7.0).all())
    assert bool((held[:, :, 2 * rows :] == 7.0).all())


@pytest.mark.parametrize("rows", [100, 150, 256])
def test_an_mlp_of_8b_in_a_graph_gives_what_it_gives_outside(rows: int) -> None:
    """Starting early: each kernel reads what the one in front has just written, in launches right behind each other."""
    kernels = triton_kernels_for("cuda:0")
    x, gate_up = tensors(rows, 28672, 4096, torch.bfloat16)
    down = tensors(1, 4096, 14336, torch.bfloat16)[1]

    def layers() -> torch.Tensor:
        states = x
        for _ in range(4):
            parts = kernels.linear_parts(kernels.gated_linear(states, gate_up, None, "silu"), down, None)
            assert parts.shape[0] > 1
            states, _ = kernels.add_rms_norm(parts, states, None, None)
        return states

    expected = layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers()
    for _ in range(20):
        graph.replay()
    assert torch.equal(found, expected)
