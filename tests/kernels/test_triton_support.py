"""What Triton's kernels need besides a GPU: what is missing is known, with its remedy, before anything compiles."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from negotiation_cases import CPU, GPU

from slotline.backends import flash_attn, flashinfer, flex, triton, triton_state
from slotline.kernels import gluon_support, triton_support
from slotline.plugins.lora import segmented

PLUGINS: dict[str, Any] = {
    "triton": triton,
    "state": triton_state,
    "lora": segmented,
    "flex": flex,
    "flash_attn": flash_attn,
    "flash_attn_3": SimpleNamespace(probe=flash_attn.probe_3, descriptor=flash_attn.descriptor_3),
    "flashinfer": flashinfer,
}
"""What launches kernels of Triton's, be it those that write the cache."""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_missing_package_is_the_reason_with_its_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "find_spec", lambda _: None)
    reason = PLUGINS[name].probe(GPU)
    assert "the package triton is not installed; `pip install triton`" in reason
    assert PLUGINS[name].probe(CPU) == PLUGINS[name].descriptor.capabilities, "no package makes up for a GPU"


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.usefixtures("no_compiler")
def test_a_missing_compiler_is_the_reason_with_its_remedy(name: str) -> None:
    pytest.importorskip("triton")
    reason = PLUGINS[name].probe(GPU)
    assert "finds no C compiler: gcc or clang; install one, or name it in the environment variable CC" in reason
    assert PLUGINS[name].probe(CPU) == PLUGINS[name].descriptor.capabilities


def test_products_and_sums_stay_fused_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for given, expected in ((None, "1"), ("0", "0")):
        monkeypatch.delenv(triton_support.FUSION, raising=False)
        if given is not None:
            monkeypatch.setenv(triton_support.FUSION, given)
        triton_support.why_no_triton()
        assert os.environ[triton_support.FUSION] == expected


@pytest.mark.usefixtures("no_compiler")
def test_the_compiler_is_looked_for_where_triton_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "'no-such-compiler', which CC names" in str(triton_support.why_no_triton())
    monkeypatch.setenv("CC", sys.executable)
    assert triton_support.why_no_triton() is None
    monkeypatch.delenv("CC")
    (tmp_path / "clang").symlink_to(sys.executable)
    assert triton_support.why_no_triton() is None
    (tmp_path / "clang").unlink()
    monkeypatch.setattr(knobs.build, "impl", lambda *_: None)
    assert triton_support.why_no_triton() is None, "who builds launchers in another way needs no compiler"


@pytest.mark.usefixtures("no_compiler")
def test_slower_operations_in_place_of_kernels_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    triton_support.has_triton.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "slotline"):
            assert not triton_support.has_triton()
            assert not triton_support.has_triton()
    finally:
        triton_support.has_triton.cache_clear()
    (told,) = caplog.messages
    assert told.startswith("torch's operations do the work of Triton's kernels on this GPU")
    assert "finds no C compiler" in told


def test_a_kernel_that_does_not_compile_is_told_once_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """The warning names what the kernel serves, the release of Triton and the compiler's last line."""
    compilers = pytest.importorskip("triton.compiler")
    tried: list[int] = []

    def fail(rows: int, *, heads: int) -> None:
        tried.append(rows * heads)
        raise compilers.CompilationError("", None, "at 7:4:\nshapes of the product differ")

    launch = gluon_support.HopperLaunch("prompts of a test", fail)
    other = gluon_support.HopperLaunch("tokens of a test", lambda rows: tried.append(rows))
    gluon_support._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "slotline"):
        assert [launch(3, heads=2), launch(5, heads=2), other(8)] == [False, False, True]
    assert tried == [6, 8]
    (told,) = caplog.messages
    release = pytest.importorskip("triton").__version__
    assert told.startswith("Hopper's own kernels for prompts of a test are not used")
    assert f"triton {release} does not compile them (shapes of the product differ)" in told


def test_an_engine_on_a_machine_without_triton_imports_none() -> None:
    """What needs it is imported where a GPU is, since Triton is not on every platform."""
    code = """if True:
        import sys
        sys.modules["triton"] = None  # any import of it fails
        import slotline.builder.engine_builder
        from slotline.core import LLM"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
