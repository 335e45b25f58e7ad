"""Kernels that ship as CUDA C++: what compiles them, what is kept, and what is said where it cannot be done."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from slotline.kernels import nvrtc as cuda_kernels
from slotline.registry.errors import PluginLoadError

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'
needs_nvrtc = pytest.mark.skipif(cuda_kernels.why_no_cuda_sources() is not None, reason="needs cuda-bindings and NVRTC")


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@needs_nvrtc
def test_what_was_compiled_is_kept_for_the_next_start(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = cuda_kernels.compiled(KERNEL, "sm_90a")
    assert image.startswith(b"\x7fELF")
    (file,) = cached.iterdir()
    assert file.read_bytes().endswith(image)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_kernels, "_compile", lambda *_: pytest.fail("compiled again"))
        assert cuda_kernels.compiled(KERNEL, "sm_90a") == image
    assert cuda_kernels.compiled(KERNEL, "sm_80") != image
    assert cuda_kernels.compiled(KERNEL.replace("2.0f", "3.0f"), "sm_90a") != image
    assert len(list(cached.iterdir())) == 3


@needs_nvrtc
def test_a_cache_that_cannot_be_written_costs_the_next_start_alone(
    cached: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached.parent.write_text("in the way")
    with caplog.at_level(logging.WARNING, "slotline"):
        assert cuda_kernels.compiled(KERNEL, "sm_90a").startswith(b"\x7fELF")
    assert "not kept for the next start" in caplog.text


@needs_nvrtc
def test_a_source_with_a_fault_is_refused_with_the_compilers_words(cached: Path) -> None:
    with pytest.raises(PluginLoadError, match='identifier "y" is undefined') as caught:
        cuda_kernels.compiled(KERNEL.replace("2.0f", "y"), "sm_90a")
    assert "sm_90a" in caught.value.message
    assert not cached.exists()


def test_without_the_compiler_there_is_a_reason_and_a_way_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cuda_kernels.has_cuda_sources.cache_clear()
    with caplog.at_level(logging.WARNING, "slotline"):
        assert not cuda_kernels.has_cuda_sources()
        assert not cuda_kernels.has_cuda_sources()
    cuda_kernels.has_cuda_sources.cache_clear()
    (record,) = caplog.records
    assert "pip install cuda-bindings" in record.getMessage()
