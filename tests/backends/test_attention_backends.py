"""The built-in attention backends pass the conformance suite; and what the suite does not ask."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from attrs import evolve
from small_sizes import in_small

from slotline.backends import cpu
from slotline.registry.capability import Range, Set
from slotline.testing import Check, Level, Outcome, check_plugin
from slotline.testing.environments.attention import BACKEND_THREADS, Case, World, threads
from slotline.testing.environments.attention_shapes import SHAPES, with_empty_rows

MODULES = {"torch": "slotline.backends.torch_sdpa", "cpu": "slotline.backends.cpu"}
CHECKS = {
    56: {"attention.write.skipped", "attention.pages.unread"},
    67: {"attention.decode", "attention.mixed", "attention.pages.layout", "attention.stateful.random_history"},
}
"""Row of the behaviour list -> checks that prove it."""
FEW = evolve(
    cpu.CAPABILITIES,
    dtypes=Set((("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float8_e4m3fn"))),
    head_sizes=Range(64, 64, extra=(7, 80)),
)
"""What `cpu` compiles in half a minute: each further pair of dtypes and each further head size take three seconds."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODULES)
def test_a_built_in_backend_passes_with_all_dtypes_and_at_large_sizes(name: str) -> None:
    records = check_plugin(f"attention:{name}", device="cpu", level=Level.STATEFUL)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert "attention.sizes.shapes" in {record.id for record in records if record.outcome is Outcome.PASSED}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.behaviour(56, 67)
def test_a_built_in_backend_passes_the_suite_up_to_long_histories(name: str) -> None:
    def plain(item: Check) -> bool:
        return in_small(item) and "formats" not in item.id  # the tests of caches have these

    descriptor = import_module(MODULES[name]).descriptor
    if name == "cpu":
        descriptor = evolve(descriptor, capabilities=FEW, probe=None)
    records = check_plugin(descriptor, device="cpu", level=Level.STATEFUL, only=plain)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    passed = {record.id for record in records if record.outcome is Outcome.PASSED}
    assert set.union(*CHECKS.values()) <= passed
    worst = max((record for record in records if record.mandatory), key=lambda record: record.ratio or 0.0)
    assert worst.ratio is not None
    assert worst.ratio < 0.5, f"{worst.key} uses {worst.ratio:.2f} of what is allowed: right kernels leave room"


@pytest.mark.behaviour(68)
def test_an_encoder_sees_all_of_its_own_tokens() -> None:
    records = check_plugin("attention:torch", device="cpu", only="attention.encoder_only")
    assert {record.outcome for record in records} == {Outcome.PASSED}


@pytest.mark.behaviour(69)
def test_cross_attention_stores_and_reads_all_of_an_encoders_keys() -> None:
    records = check_plugin("attention:torch", device="cpu", only=lambda item: item.id.startswith("attention.cross"))
    assert {record.outcome for record in records} == {Outcome.PASSED}
    assert len(records) == 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("size", [24, 256])
@pytest.mark.parametrize("name", MODULES)
def test_blocks_that_are_no_power_of_two_or_very_large_work_on_two_threads(name: str, size: int, layout: str) -> None:
    module, attribute = import_module(MODULES[name]).descriptor.factory.split(":")
    case = Case(requests=with_empty_rows(SHAPES["mixed"](16)), block_size=size, layout=layout, dtype=torch.bfloat16)
    with threads(BACKEND_THREADS):
        backend = getattr(import_module(module), attribute)(case.context())
    world = World(case)
    world.check(*world.run(backend, num_threads=BACKEND_THREADS))


@pytest.mark.parametrize("module", [*MODULES.values(), "slotline.plugins.kv_specs.full"])
def test_a_descriptor_is_read_without_torch(module: str) -> None:
    paths = [path for path in sys.path if path]
    code = f"""import sys; sys.path[:0] = {paths!r}
import {module} as m; print(m.descriptor.name, 'torch' in sys.modules, 'numba' in sys.modules)"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split()[1:] == ["False", "False"]


def test_the_cpu_backend_is_refused_with_a_reason_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    from slotline.backends.cpu import descriptor
    from slotline.registry.descriptor import DeviceInfo

    assert descriptor.probe(DeviceInfo(type="cpu")) == descriptor.capabilities
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "numba" in descriptor.probe(DeviceInfo(type="cpu"))


@pytest.mark.slow
def test_the_cpu_backend_leaves_the_number_of_threads_as_it_is() -> None:
    code = """
import torch
from slotline.core import LLM
LLM(device="cpu", backend="cpu", max_model_len=32, memory="1MiB")
print(torch.get_num_threads())
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLOTLINE_OBSERVABILITY__PROGRESS": "false"}
    # a process of its own: numba starts its threads once
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.split() == ["1"]
