"""The backends around libraries (FlashInfer, flash-attn, FlexAttention), as far as a machine without a GPU can tell."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from negotiation_cases import FULL, GPU, explicit, layer, request, sliding

from slotline.backends import flash_attn, flashinfer, flex, triton
from slotline.backends.flashinfer.modules import compile_kernels
from slotline.backends.flex import backend as flex_backend
from slotline.backends.sinks import add_sinks
from slotline.registry.descriptor import DeviceInfo
from slotline.registry.errors import NegotiationError, PluginError
from slotline.registry.negotiation import Asked, Candidate, Plan, negotiate
from slotline.testing import Outcome, check_plugin
from slotline.testing.environments.attention import Case, World

CPU = DeviceInfo(type="cpu")
MODULES = {"flashinfer": flashinfer, "flash_attn": flash_attn}
HALF = Asked("bfloat16", "checkpoint", False)

pytestmark = pytest.mark.usefixtures("c_compiler")


def without(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> None:
    """Let a backend's module find every package but these."""
    monkeypatch.setattr(module, "find_spec", lambda name: None if name in names else object())


def candidate(module: Any) -> Candidate:
    return Candidate(descriptor=module.descriptor, distribution="slotline", version="0.1.0")


def plan_of(*layers: Any, modules: tuple[Any, ...] = (flash_attn, flashinfer, flex, triton), **changes: Any) -> Plan:
    """The plan for an H200 where all libraries are installed."""
    asked = evolve(request(*layers, device=GPU), dtype=HALF, **changes)
    return negotiate(asked, [candidate(module) for module in modules], [FULL])


@pytest.mark.parametrize("name", [*MODULES, "flex"])
def test_a_descriptor_is_read_without_torch_and_without_the_library(name: str) -> None:
    code = f"""import sys; sys.path[:0] = {[path for path in sys.path if path]!r}
import slotline.backends.{name} as m
print(m.descriptor.name, *(name in sys.modules for name in ("torch", "flashinfer", "flash_attn")))"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [name, "False", "False", "False"]


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_package_is_the_reason_with_its_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODULES[name]
    without(monkeypatch, module, name)
    reason = module.probe(GPU)
    assert f"the package {name} is not installed" in reason
    assert "pip install flash" in reason
    assert module.probe(CPU) == module.descriptor.capabilities, "a package is no remedy for the lack of a GPU"


def test_flex_takes_small_heads_on_a_cpu_alone() -> None:
    assert flex.probe(CPU).head_sizes.refusal(7) is None
    assert flex.probe(GPU).head_sizes.refusal(7) == "needs 7, offers 16 and up"


def test_flash_attn_3_is_for_hopper() -> None:
    newer = evolve(GPU, name="B200", compute_capability=(10, 0))
    assert "runs on Hopper (compute capability 9.0), this is B200" in flash_attn.probe_3(newer)


class TestFlashAttn3OnThePath:
    """What its probe finds in real folders, and imports nothing of."""

    @pytest.fixture(autouse=True)
    def _only_these_folders(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Python's path is `second` behind `flash_attn`, of which a test makes what it needs."""
        monkeypatch.setattr(flash_attn, "why_no_triton", lambda: None)
        monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
        monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("flash_attn", "second")])

    @staticmethod
    def _write(*files: Path) -> None:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("raise AssertionError('a probe imports nothing')")
        invalidate_caches()

    def test_where_it_is_absent_the_reason_says_what_to_build(self, tmp_path: Path) -> None:
        self._write(tmp_path / "second" / "flash_attn" / "__init__.py")
        reason = flash_attn.probe_3(GPU)
        assert "the package flash_attn_interface is not installed; build it from the folder hopper" in reason

    def test_a_file_of_flash_attn_2_in_front_is_named_with_its_place_and_the_remedy(self, tmp_path: Path) -> None:
        file = tmp_path / "flash_attn" / "flash_attn_interface.py"
        self._write(file, file.with_name("__init__.py"), tmp_path / "second" / file.name)
        reason = flash_attn.probe_3(GPU)
        assert f"flash_attn_interface is {file} here, a file of FlashAttention 2's package" in reason
        assert "take that folder off Python's path" in reason
        sys.path.remove(str(file.parent))  # the remedy
        assert flash_attn.probe_3(GPU) == flash_attn.descriptor_3.capabilities

    @pytest.mark.parametrize("files", [("flash_attn_interface.py",), ("__init__.py", "flash_attn_interface.py")])
    def test_its_own_module_is_the_offer(self, files: tuple[str, ...], tmp_path: Path) -> None:
        """Installed, or in the folder of its sources, which is a package itself."""
        self._write(*(tmp_path / "second" / file for file in files))
        assert flash_attn.probe_3(GPU) == flash_attn.descriptor_3.capabilities


@pytest.mark.parametrize("tool", ["nvcc", "ninja"])
def test_flashinfer_is_refused_without_a_compiler_unless_its_kernels_are_compiled(
    tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(flashinfer, "which", lambda name: None)
    monkeypatch.setattr(flashinfer, "CUDA", tmp_path / "nowhere")
    without(monkeypatch, flashinfer, "flashinfer_jit_cache")
    assert flashinfer.probe(GPU) == flashinfer.descriptor.capabilities
    if tool == "nvcc":
        monkeypatch.delenv("CUDA_HOME")
        monkeypatch.delenv("CUDA_PATH", raising=False)
    else:
        without(monkeypatch, flashinfer, "flashinfer_jit_cache", "ninja")
    assert f"finds no {tool}" in flashinfer.probe(GPU)
    assert "flashinfer-jit-cache" in flashinfer.probe(GPU)
    without(monkeypatch, flashinfer, "ninja")  # jit-cache is there
    assert flashinfer.probe(GPU) == flashinfer.descriptor.capabilities


class Spec:
    """Stands in for a module of FlashInfer that is to be compiled."""

    both = threading.Barrier(2, timeout=20)

    def __init__(self, kernel: str, is_compiled: bool, error: str = "") -> None:
        self.kernel, self.is_compiled, self.error = kernel, is_compiled, error

    def build(self, verbose: bool) -> None:
        assert not self.is_compiled
        if self.error:
            raise RuntimeError(self.error)
        self.both.wait()  # passes only if the other one is being compiled at the same time
        self.is_compiled = True


def compile_with(monkeypatch: pytest.MonkeyPatch, *specs: Spec) -> None:
    """Compile a group's modules, where FlashInfer makes these of them."""
    made = {spec.kernel: spec for spec in specs}
    jit = SimpleNamespace(gen_batch_prefill_module=lambda kernel, *_: made[kernel])
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(jit=jit))
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    compile_kernels(Case(requests=((1, 16),), dtype=torch.bfloat16).context("cuda"), tuple(made))


def test_flashinfer_s_modules_are_compiled_at_the_same_time_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = (Spec("fa2", is_compiled=False), Spec("fa3", is_compiled=False))
    compile_with(monkeypatch, *specs)
    assert all(spec.is_compiled for spec in specs)
    compile_with(monkeypatch, *specs)


def test_what_flashinfer_cannot_compile_is_an_error_with_the_compiler_s_last_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PluginError, match=r"cannot compile its kernels: nvcc fatal.*\n.*show-config"):
        compile_with(monkeypatch, Spec("fa2", is_compiled=False, error="ninja failed\nnvcc fatal: no such file\n"))


def test_an_old_gpu_is_refused_by_its_compute_capability() -> None:
    old = evolve(GPU, compute_capability=(7, 5))
    with pytest.raises(NegotiationError) as caught:
        negotiate(evolve(request(device=old), dtype=HALF), [candidate(flashinfer), candidate(flash_attn)], [FULL])
    assert {reason.code for reason in caught.value.reasons} >= {"N102"}


@pytest.mark.behaviour(151)
def test_flash_attn_against_blocks_of_16_is_refused_with_the_block_size_that_helps() -> None:
    asked = {"backend": explicit("flash_attn"), "block_size": explicit(16, "run.toml:4")}
    with pytest.raises(NegotiationError) as caught:
        plan_of(modules=(flash_attn, triton), **asked)
    (reason,) = (reason for reason in caught.value.reasons if "multiples of 256" in reason.text)
    assert "needs a size that divides 16, offers multiples of 256" in reason.text
    assert caught.value.failure is not None
    assert set(caught.value.failure.remedies) == {'attention.backend = "triton"', "cache.block_size = 256"}
    plan = plan_of(backend=explicit("flash_attn"))
    assert (plan.block_size, plan.groups[0].backend) == (256, "flash_attn")
    assert "N301" in [note.code for note in plan.downgrades]


def test_layers_of_a_mixed_model_get_the_backends_that_the_file_names_by_kind() -> None:
    plan = plan_of(
        layer(0),
        sliding(1),
        backend=explicit({"full": "flashinfer", "sliding": "flash_attn"}),
    )
    assert {group.name: group.backend for group in plan.groups} == {"full": "flashinfer", "sliding": "flash_attn"}
    assert {group.block_size for group in plan.groups} == {256}


@pytest.mark.parametrize(
    ("backend", "captured"),
    [("flashinfer", {"decode": True, "verify": False}), ("flash_attn", {"decode": True, "verify": True})],
)
def test_what_is_captured_under_speculation(backend: str, captured: dict[str, bool]) -> None:
    plan = plan_of(backend=explicit(backend), query_len=Asked(5, "drafter", True))
    assert {phase: plan.groups[0].captured(phase) for phase in captured} == captured


FLEX_CHECKS = {
    "attention.features.hostile",
    "attention.lse.scores",
    "attention.mixed",
    "attention.pages.unread",
    "attention.rows.empty",
    "attention.window.freed",
    "attention.write.skipped",
}
"""The others take a minute, most of it tracing FlexAttention anew for each shape; the support matrix has them all."""


@pytest.mark.slow
@pytest.mark.parametrize("slots", [65_536, 40])
def test_flex_is_right_in_hostile_surroundings(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_backend, "MOST_SLOTS", slots)
    records = check_plugin("attention:flex", device="cpu", only=lambda check: check.id in FLEX_CHECKS)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert {record.id for record in records if record.outcome is Outcome.PASSED} == FLEX_CHECKS


def test_flex_gathers_some_requests_at_a_time() -> None:
    world = World(Case(requests=((1, 40_000), (1, 20_000), (2, 30_000), (1, 70_000), (3, 3)), block_size=16))
    plan = flex_backend.FlexBackend(world.case.context("cpu")).plan(world.batch)
    assert [len(part.pages) * 16 for part in plan.parts] == [60_000, 30_000, 70_000, 16]


@pytest.mark.parametrize("base", ["e", "2"])
def test_a_sink_added_afterwards_is_one_more_key(base: str) -> None:
    scores, values = torch.randn(3, 2, 5), torch.randn(3, 5, 4)  # [token, head, key], [token, key, size]
    sinks = torch.randn(2)
    whole = torch.cat([scores, sinks[None, :, None].expand(3, -1, 1)], 2)
    out, lse = torch.softmax(scores, 2) @ values, torch.logsumexp(scores, 2)
    unit = 1.0 if base == "e" else math.log(2.0)
    norms = add_sinks(out, lse / unit, sinks, base=base)
    torch.testing.assert_close(out, torch.softmax(whole, 2)[:, :, :5] @ values)
    torch.testing.assert_close(norms * unit, torch.logsumexp(whole, 2))


def test_a_sink_on_a_row_that_sees_nothing_leaves_zeros() -> None:
    out = torch.zeros(1, 2, 4)
    assert torch.equal(
        add_sinks(out, torch.full((1, 2), -torch.inf), torch.tensor([0.5, -1.0])), torch.tensor([[0.5, -1.0]])
    )
    assert not out.any()


class TestPages:
    """FlashInfer's lists of pages; the kernel under Triton's interpreter."""

    REQUESTS = ((1, 33), (1, 100), (0, 9), (0, 0), (5, 60))

    def test_pages_before_every_querys_window_are_left_out(self) -> None:
        pages = pytest.importorskip("slotline.backends.flashinfer.pages")
        world = World(Case(requests=self.REQUESTS, window=17, freed_before_window=True))
        found = pages.pages_of(world.batch, 0, 5, 16, 17)
        assert found.skipped.tolist() == [1, 5, 0, 0, 2]
        assert found.lens.tolist() == [17, 20, 9, 0, 28]
        assert np.diff(found.indptr).tolist() == [2, 2, 1, 0, 2]
        assert found.last_page_len.tolist() == [1, 4, 9, 0, 12]

    def test_without_a_window_every_page_is_listed(self) -> None:
        pages = pytest.importorskip("slotline.backends.flashinfer.pages")
        world = World(Case(requests=self.REQUESTS))
        found = pages.pages_of(world.batch, 1, 5, 16, None)
        assert found.skipped.tolist() == [0, 0, 0, 0]
        assert np.diff(found.indptr).tolist() == [7, 1, 0, 4]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled for the GPU here")
    def test_the_kernel_lines_up_the_pages_of_all_requests(self) -> None:
        pages = pytest.importorskip("slotline.backends.flashinfer.pages")
        world = World(Case(requests=self.REQUESTS, window=17, freed_before_window=True))
        found = pages.pages_of(world.batch, 0, 5, 16, 17)
        indices = torch.full((16,), -7, dtype=torch.int32)
        table, lists = world.block_table, (torch.from_numpy(found.indptr), torch.from_numpy(found.skipped))
        pages.line_up[(5,)](table, table.stride(0), *lists, indices, block=16)
        owned = [block for blocks in world.owned for block in blocks if block]
        assert indices.tolist() == owned + [-7] * (16 - len(owned))


def test_every_library_backend_has_an_entry_point() -> None:
    from slotline.registry.descriptor import Kind
    from slotline.registry.discovery import PluginRegistry

    registry = PluginRegistry.discover(tolerant=True)
    for name in (*MODULES, "flex"):
        assert registry.load(Kind.ATTENTION, name) is import_module(f"slotline.backends.{name}").descriptor
