"""Products by the library's algorithms on a GPU: which are chosen, when, and that their results are torch's."""

from __future__ import annotations

import pytest
import torch

from slotline.core.launching import choosing
from slotline.plugins.model_families.passes import library_products
from slotline.plugins.model_families.passes.library_products import LibraryProducts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [(48, 4096, 14336), (176, 6144, 4096), (224, 4096, 4096), (256, 1000, 512), (512, 512, 256)]


def tensors(rows: int, outputs: int, elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(rows, elements, device="cuda").to(dtype)
    return x, (torch.randn(outputs, elements, device="cuda") / elements**0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("result", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_captured_is_torch_s_result(
    shape: tuple[int, int, int], result: torch.dtype | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_products, "CLEARLY", 1e9)  # the last that the library offers is taken
    products, (x, weight) = LibraryProducts(), tensors(*shape, dtype)
    assert products.linear(x, weight, result) is None
    with choosing():
        assert products.linear(x, weight, result) is not None
    assert products.linear(x, weight, result) is None  # steps that are not captured are torch's
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = products.linear(x, weight, result)
    assert out is not None
    for seed in range(2):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        expected = x.float() @ weight.float().t()
        assert (out.float() - expected).norm() <= 0.01 * expected.norm()
    assert out.dtype == (result or dtype)


def test_a_capture_without_a_choice_is_torch_s() -> None:
    products, (x, weight) = LibraryProducts(), tensors(64, 256, 256, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert products.linear(x, weight) is None


def test_what_the_library_does_not_take_is_left_to_torch() -> None:
    products = LibraryProducts()
    x, weight = tensors(64, 256, 256, torch.bfloat16)
    with choosing():
        for unsuited in (x[1:, 1:].contiguous()[:, :255], x[:, :252].contiguous()):
            assert products.linear(unsuited, weight[:, : unsuited.shape[1]].contiguous()) is None
        assert products.linear(x[:20], weight) is None
        assert products.linear(x.float(), weight.float()) is None


def test_only_an_algorithm_that_is_clearly_faster_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = tensors(64, 256, 256, torch.bfloat16)
    for times, expected in (((5.0, 4.95, 4.91), False), ((5.0, 4.8, 4.75), True)):
        monkeypatch.setattr(library_products, "_times", lambda runs, flushed, times=times: times[: len(runs)])
        products = LibraryProducts()
        with choosing():
            assert (products.linear(x, weight) is not None) == expected
