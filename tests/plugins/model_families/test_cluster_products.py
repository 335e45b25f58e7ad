"""Products of some tens to some hundreds of rows on Hopper: how they are cut, and that what is launched compiles."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from slotline.kernels import nvrtc as cuda_kernels
from slotline.plugins.model_families.passes import cluster_products
from slotline.plugins.model_families.passes.cluster_products import ClusterProducts, Form, Kind, source
from slotline.plugins.model_families.passes.cuda_sources import ACTIVATIONS

H200 = 132
SIZES = {"gated": (14336, 4096), "parts": (4096, 14336), "floats": (128256, 4096)}  # of Llama-3.1-8B
sizes = st.integers(1, 300).map(lambda count: 64 * count)


@pytest.mark.parametrize(
    ("rows", "kind", "form", "parts", "items"),
    [
        (33, "gated", Form(1, 224, False, True, False), 1, 64),
        (64, "parts", Form(1, 128, False, False, True), 4, 64),
        (128, "gated", Form(2, 224, False, True, False), 1, 64),
        (192, "gated", Form(3, 224, False, True, False), 1, 64),
        (192, "parts", Form(3, 128, False, False, True), 4, 64),
        (192, "floats", Form(3, 256, False, False, True), 1, 251),
        (193, "gated", Form(2, 224, True, True, False), 1, 128),
        (256, "parts", Form(2, 128, True, False, True), 2, 64),
    ],
)
def test_the_weights_of_8b_give_each_multiprocessor_of_an_h200_the_same(
    rows: int, kind: Kind, form: Form, parts: int, items: int
) -> None:
    cut = ClusterProducts(early=True, multiprocessors=H200).cut(rows, *SIZES[kind], kind)
    assert cut == (form, parts, items)


@given(
    rows=st.integers(33, 256),
    n=sizes,
    k=sizes,
    kind=st.sampled_from(get_args(Kind)),
    multiprocessors=st.integers(2, 160),
)
def test_every_cut_covers_the_weight_and_fits_a_multiprocessor(
    rows: int, n: int, k: int, kind: Kind, multiprocessors: int
) -> None:
    cut = ClusterProducts(early=True, multiprocessors=multiprocessors).cut(rows, n, k, kind)
    if cut is None:
        return
    form, parts, items = cut
    assert rows <= form.rows * (2 if form.by_rows else 1)
    outputs = form.columns // (2 if kind == "gated" else 1) * (1 if form.by_rows else 2)
    assert items % parts == 0
    assert items // parts * outputs >= n > (items // parts - 1) * outputs
    assert k % (parts * 64) == 0
    assert form.floats == (parts > 1 or kind == "floats")
    assert parts == 1 or kind == "parts"
    assert form.stages >= 3
    assert form.shared_bytes <= 227 * 1024
    registers = cluster_products.REGISTERS[form.groups]
    assert 128 * (registers[0] + form.groups * registers[1]) <= 65536
    rounds = -(-items // (multiprocessors // 2))
    assert items >= 0.8 * rounds * (multiprocessors // 2)


def test_few_tiles_and_odd_outputs_are_left_to_the_library() -> None:
    products = ClusterProducts(early=True, multiprocessors=H200)
    assert products.cut(100, 4096, 4096, "gated") is None  # 37 tiles of 112 for 132 multiprocessors
    assert products.cut(100, 14340, 4096, "gated") is None
    assert products.cut(100, 14336, 4100, "gated") is None


@pytest.mark.parametrize(
    ("change", "compiled"),
    [("none", 4), ("rows", 4), ("place", 4), ("elements", 0), ("bias", 0), ("dtype", 0), ("small", 0), ("sources", 0)],
)
def test_what_is_asked_before_a_product(change: str, compiled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, str]]()
    monkeypatch.setattr(cluster_products, "compiled", lambda text, architecture: asked.append((text, architecture)))
    monkeypatch.setattr(cluster_products, "has_cuda_sources", lambda: change != "sources")
    products = ClusterProducts(early=True, multiprocessors=H200)
    dtype = torch.float32 if change == "dtype" else torch.bfloat16
    rows, k = 257 if change == "rows" else 256, 4080 if change == "elements" else 4096
    x = torch.empty(rows * k + 8, dtype=dtype)[1 if change == "place" else 0 :][: rows * k].view(rows, k)
    weight = torch.empty(6144 if change == "small" else 28672, k, dtype=dtype)
    bias = torch.empty(28672) if change == "bias" else None
    assert products.suits(x, weight, bias, "gated", "silu") is (change == "none")
    for image in products._images.values():
        image.result()
    # Asked for any number of rows, all kernels are compiled, once each.
    assert len(asked) == len({text for text, _ in asked}) == compiled
    assert products.suits(x, weight, bias, "gated", "silu") is (change == "none")
    assert len(products._images) == compiled


def test_rows_and_kinds_that_the_library_is_faster_for_are_left_to_it() -> None:
    products = ClusterProducts(early=True, multiprocessors=H200)
    assert products.cut(32, 14336, 4096, "gated") is None
    assert products.cut(257, 14336, 4096, "gated") is None
    assert products.cut(193, 128256, 4096, "floats") is None
    assert products.cut(100, 4096, 14336, "parts") is not None
    assert products.cut(100, 8192, 4096, "parts") is None  # behind 4,096 gated outputs, too few for all multiprocessors


@pytest.mark.skipif(cuda_kernels.why_no_cuda_sources() is not None, reason="needs cuda-bindings and NVRTC")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [64, 128, 192, 256])
def test_every_kernel_compiles_with_its_sums_in_registers(
    rows: int, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    products = ClusterProducts(early=True, multiprocessors=H200)
    for kind in ("parts", "floats") if activation == "none" else ("gated",):
        cut = products.cut(rows, *SIZES[kind], kind)
        if cut is None:
            assert (rows, kind) == (256, "floats")
            continue
        image = cuda_kernels.compiled(source(cut.form, torch.bfloat16, activation), "sm_90a")
        (tmp_path / "image").write_bytes(image)
        usage = cuobjdump("-res-usage", tmp_path / "image")
        assert re.search(r"STACK:0 .*LOCAL:0 ", usage), usage
        code = cuobjdump("-sass", tmp_path / "image")
        assert code.count("HGMMA") >= 4
        assert "MEMBAR" not in code  # one for each tile of elements would take longer than its product


def cuobjdump(option: str, image: Path) -> str:
    """What Triton's copy says of machine code."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([program, option, image], capture_output=True, text=True, check=True).stdout
