"""Selection of engines to try: accepted by negotiation, one thing varied at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from slotline.registry.negotiation import Plan

MODES = ("full", "full_and_piecewise", "full_decode_only", "piecewise", "none")


@frozen(kw_only=True)
class Trial:
    """One engine to build.

    Attributes:
        varied: the varied setting: ``backend``, ``block size`` or ``graphs``.
        settings: values by dotted key.
    """

    varied: str
    settings: Mapping[str, Any]

    def describe(self) -> str:
        """Return the settings on one line."""
        return ", ".join(f"{key}={_plain(value)}" for key, value in self.settings.items()) or "as configured"


def backends_of(plan: Plan) -> dict[str, str]:
    """Return the plan's backend of each kind of layers."""
    return {group.layers[0].kv_kind: group.backend for group in plan.groups}


def feasible_backends(plan: Plan) -> dict[str, list[str]]:
    """Return, by kind of layers, the backends that could serve all of its groups, the plan's own first."""
    found: dict[str, list[str]] = {}
    for group in plan.groups:
        lost = [item.name for item in group.rejected if {reason.code for reason in item.reasons} == {"N191"}]
        own, kind = [group.backend, *lost], group.layers[0].kv_kind
        found[kind] = [name for name in found.get(kind, own) if name in own]
    return found


def refused_backends(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield backends that cannot serve a group, with the reasons."""
    feasible = feasible_backends(plan)
    for group in plan.groups:
        for item in group.rejected:
            if item.name not in feasible[group.layers[0].kv_kind]:
                reasons = [f"{reason.code} {reason.text}" for reason in item.reasons if reason.code != "N191"]
                yield f"{group.name}={item.name}", "; ".join(reasons) or "cannot serve every group of this kind"


def backend_trials(plan: Plan) -> Iterator[Trial]:
    """Yield the plan as it is, then each other backend in one kind of layers, the rest as planned."""
    base = backends_of(plan)
    yield backend_trial(base)
    for kind, names in feasible_backends(plan).items():
        yield from (backend_trial({**base, kind: name}) for name in names if name != base[kind])


def backend_trial(backends: Mapping[str, str]) -> Trial:
    """Return a trial of the given backends."""
    return Trial(varied="backend", settings={"attention.backend": one_or_table(backends)})


def block_size_trials(backends: Mapping[str, str], taken: int, sizes: Sequence[int]) -> Iterator[Trial]:
    """Yield trials of the block sizes that other backends take."""
    for size in sizes:
        if size != taken:
            settings = {"attention.backend": one_or_table(backends), "cache.block_size": size}
            yield Trial(varied="block size", settings=settings)


def graph_trials(backends: Mapping[str, str], block_size: int, measured: str) -> Iterator[Trial]:
    """Yield trials of each graph mode but the measured one."""
    for mode in MODES:
        if mode != measured:
            settings = {"attention.backend": one_or_table(backends), "cache.block_size": block_size}
            yield Trial(varied="graphs", settings={**settings, "graphs.mode": mode})


def one_or_table(backends: Mapping[str, str]) -> str | dict[str, str]:
    """Return the value of ``attention.backend``."""
    names = set(backends.values())
    return names.pop() if len(names) == 1 else dict(backends)


def _plain(value: Any) -> str:
    return "/".join(value.values()) if isinstance(value, Mapping) else str(value)
