"""Features of attention that work although they are not declared. Informational: failures do not count."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import evolve

from slotline.registry.descriptor import Kind
from slotline.testing.check import Family, Level, NotApplicable, Run, check
from slotline.testing.environments.attention_choice import build, choose, world, writes_cache

FEATURES: Mapping[str, tuple[Any, Mapping[str, Any]]] = MappingProxyType(
    {
        "sliding_window": (True, {"window": 9}),
        "soft_cap": (True, {"soft_cap": 5.0, "amplitude": 6.0}),
        "sinks": (True, {"sinks": True}),
        "alibi": (True, {"alibi": True}),
        "position_bias": (True, {"position_bias": True}),
        "lse": (True, {}),
        "attention_types": ("encoder_only", {"attention_type": "encoder_only", "causal": False}),
    }
)
"""Capability -> (need, fields of a case). What could make a kernel read beyond its tensors is not tried."""


def _register(capability: str) -> None:
    need, fields = FEATURES[capability]

    def works(run: Run) -> None:
        if run.subject.device.type != "cpu":
            raise NotApplicable("not tried on a device that a fault may leave unusable")
        requests = ((20, 20), (3, 3)) if capability == "attention_types" else ((1, 33), (1, 18))
        case = evolve(choose(run.subject, requests).friendly(), **fields)
        try:
            made = world(run, case)
            out, lse = made.run(build(run, case), writes_cache(run))
            made.check(out, lse if capability == "lse" else None, run, base=run.subject.capabilities.lse_base)
            if capability == "lse" and lse is None:
                raise NotApplicable("not declared, and not returned")
        except Exception as error:  # whatever an undeclared feature does to a plugin
            raise NotApplicable(f"not declared, and does not work: {str(error).splitlines()[0]}") from error
        run.measured["note"] = f"{capability.replace('_', ' ')} works though it is not declared"

    works.__doc__ = f"{capability.replace('_', ' ').capitalize()} {need} gives right values, though it is not declared."
    name = f"attention.underdeclared.{capability}"
    check(Kind.ATTENTION, name, Level.NUMERICS, needs={capability: need}, family=Family.UNDERDECLARED)(works)


for _capability in FEATURES:
    _register(_capability)
