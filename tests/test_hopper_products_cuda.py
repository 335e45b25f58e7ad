"""Products of some tens of rows on Hopper: their results are the library's, whatever the rows and the activation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from slotline.core.hopper import has_hopper_kernels

if not torch.cuda.is_available() or not has_hopper_kernels(torch.cuda.get_device_capability()):
    pytest.skip("made for Hopper and one release of Triton", allow_module_level=True)

from slotline.plugins.model_families.passes import hopper_products
from slotline.plugins.model_families.passes.fused_kernels import TritonKernels, triton_kernels_for

ROWS = (33, 47, 64, 65, 100, 128)
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
def kernels(monkeypatch: pytest.MonkeyPatch) -> TritonKernels:
    """As on the device, for weights of any size on any number of multiprocessors."""
    monkeypatch.setattr(hopper_products, "LARGE_WEIGHT", 1)
    monkeypatch.setattr(hopper_products.HopperProducts, "_fill", lambda self, programs: programs > 0)
    return triton_kernels_for("cuda:0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", ROWS)
def test_gate_and_up_are_activated_where_they_are_made(
    rows: int, activation: str, dtype: torch.dtype, kernels: TritonKernels
) -> None:
    for n, k in ((14336, 4096), (256, 64), (1280, 192)):
        x, weight = tensors(rows, 2 * n, k, dtype)
        gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
        assert kernels._hopper is not None
        assert kernels._hopper.parts(x, weight, None, gated=True) == 1
        found = kernels._hopper.dot(x, weight, 1, activation)[0]
        assert found.dtype == dtype
        assert far(found, ACTIVATIONS[activation](gate) * up) < 0.006


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
def test_parts_are_float32_and_add_up(rows: int, dtype: torch.dtype, kernels: TritonKernels) -> None:
    assert kernels._hopper is not None
    for n, k, parts in ((4096, 14336, 4), (128, 2048, 2), (384, 1024, 1)):
        x, weight = tensors(rows, n, k, dtype)
        assert kernels._hopper.parts(x, weight, None, gated=False) == parts
        found = kernels._hopper.dot(x, weight, parts)
        assert found.shape == (parts, 1, rows, n)
        assert found.dtype == (torch.float32 if parts > 1 else dtype)
        assert far(found.double().sum(0), x.double() @ weight.double().t()) < (1e-5 if parts > 1 else 0.004)


def test_an_mlp_of_8b_in_a_graph_gives_what_it_gives_outside() -> None:
    """Starting early: each kernel reads what the one in front has just written, in launches right behind each other."""
    kernels = triton_kernels_for("cuda:0")
    x, gate_up = tensors(100, 28672, 4096, torch.bfloat16)
    down = tensors(1, 4096, 14336, torch.bfloat16)[1]

    def layers() -> torch.Tensor:
        states = x
        for _ in range(4):
            parts = kernels.linear_parts(kernels.gated_linear(states, gate_up, None, "silu"), down, None)
            assert parts.shape[0] == 4
            states, _ = kernels.add_rms_norm(parts, states, None, None)
        return states

    expected = layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers()
    for _ in range(20):
        graph.replay()
    assert torch.equal(found, expected)
