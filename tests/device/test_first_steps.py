"""Which models' first steps are recorded to find their kernels: those whose forward pass is known to be capturable."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slotline.builder import warmup as first_steps
from slotline.builder.warmup import Warmup
from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.registry.negotiation.groups import GraphPlan
from slotline.registry.ranks import Place, RankLayout


def graphs_of(**phases: str) -> GraphPlan:
    return GraphPlan(asked="auto", resolved="full_decode_only", phases=tuple(phases.items()))


def made(**changes: Any) -> Warmup:
    """Of a plain decoder in graphs, changed at the paths."""
    groups = (SimpleNamespace(name="full", any_captured=True), SimpleNamespace(name="other", any_captured=False))
    compiler = SimpleNamespace(compile_all=lambda missing: None)
    runner = SimpleNamespace(extensions=NO_EXTENSIONS, router=SimpleNamespace(groups=groups))
    planned = SimpleNamespace(
        plan=SimpleNamespace(graphs=graphs_of(decode="full", mixed="none"), state_groups=()),
        stages=SimpleNamespace(divided=False),
        place=Place(rank=0, local_rank=0, layout=RankLayout()),
        loaded=SimpleNamespace(config=SimpleNamespace(offload_gib=0.0, scheduler=SimpleNamespace(max_requests=2))),
        facts=SimpleNamespace(modalities=(), max_encoder_len=0, vocab_size=64),
        device="cuda",
        hardware={"cuda": SimpleNamespace(ops=None, compiler=lambda: compiler)},
    )
    top = SimpleNamespace(runner=runner, planned=planned)
    for path, value in changes.items():
        *way, last = path.split("__")
        part: Any = top
        for name in way:
            part = getattr(part, name)
        assert hasattr(part, last)
        setattr(part, last, value)
    return Warmup(planned, gatherer=None, runner=runner)  # type: ignore[arg-type]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The groups whose attention was left out, of each rehearsal."""
    found: list[set[str]] = []
    monkeypatch.setattr(first_steps, "forwards", lambda runner, steps, broken: found.append(broken) or iter(()))
    monkeypatch.setattr(first_steps, "draws", lambda *_: None)
    monkeypatch.setattr(first_steps, "note_lacking", lambda *_, **__: None)
    return found


def test_a_plain_decoders_steps_are_recorded_without_attention_that_cannot_be(noted: list[set[str]]) -> None:
    made().compile_forwards()
    assert noted == [{"other"}]


@pytest.mark.parametrize(
    "change",
    [
        {"planned__plan__graphs": graphs_of(decode="none", mixed="none")},
        {"planned__plan__state_groups": ("mamba",)},
        {"planned__stages__divided": True},
        {"planned__loaded__config__offload_gib": 1.0},
        {"planned__facts__modalities": ("image",)},
        {"planned__facts__max_encoder_len": 1500},
        {"runner__extensions": Extensions(plan=(print,))},
    ],
    ids=lambda change: next(iter(change)).rsplit("__", 1)[1],
)
def test_what_need_not_be_capturable_is_left_to_its_launches(change: dict[str, Any], noted: list[set[str]]) -> None:
    made(**change).compile_forwards()
    assert noted == []
