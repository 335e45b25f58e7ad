"""Measured costs: what `slotline tune` timed, in the terms in which negotiation compares candidates.

A run is one engine on one machine: which backends, block size and graph mode it had, and the median time of a step in
each case. Its cost is the geometric mean over the cases, so that each counts by its ratio and not by its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import exp, log
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

if TYPE_CHECKING:
    from slotline.registry.negotiation.request import Candidate, PlanRequest

UNMEASURED = 10**15
"""Nanoseconds; a candidate without a figure comes behind all that have one."""
TIE = 0.02
"""Costs that are so close to the lowest, as a share of it, or closer than the samples lie to each other, count as equal
to it: the static preference decides then."""
AUTO = "auto"


@frozen(kw_only=True)
class MeasuredRun:
    """One engine that was timed, or that failed.

    Attributes:
        backends: from cache kind to backend.
        versions: from backend to its distribution's version.
        block_size: of the pool. graphs: the mode, resolved.
        aim: the mode that was asked for, or that ``auto`` aimed at.
        seconds: from case (``decode 64``) to the median time of a step; empty if it failed.
        noise: half the distance of the samples' quartiles, as a share of their median; the median over the cases.
        failure: why, in one line.
    """

    backends: Mapping[str, str]
    versions: Mapping[str, str] = field(factory=dict)
    block_size: int
    graphs: str
    aim: str = ""
    seconds: Mapping[str, float] = field(factory=dict)
    noise: float = 0.0
    failure: str = ""

    def mean(self, cases: Iterable[str]) -> float:
        """Geometric mean of the cases' seconds."""
        logs = [log(self.seconds[case]) for case in cases]
        return exp(sum(logs) / len(logs))


@frozen(kw_only=True)
class Measured:
    """All runs for one model on one device.

    Attributes:
        date: when, as in ``2026-11-21``.
        dtype, kv_dtype: the pair that was timed.
        aim: the graph mode under which backends were compared.
        runs: in the order of their measurement.
        source: the file they were read from.
    """

    date: str
    dtype: str
    kv_dtype: str
    aim: str
    runs: tuple[MeasuredRun, ...]
    source: str = ""

    @cached_property
    def cases(self) -> tuple[str, ...]:
        """The cases that every run has that did not fail."""
        done = [run for run in self.runs if run.seconds]
        return tuple(case for case in (done[0].seconds if done else ()) if all(case in run.seconds for run in done))

    @property
    def origin(self) -> str:
        """Where figures come from, for a reader."""
        return f"slotline tune {self.date}"

    def cost(self, run: MeasuredRun) -> int:
        """Nanoseconds of a step, averaged over the cases; `UNMEASURED` for a failed run."""
        return round(run.mean(self.cases) * 1e9) if run.seconds and self.cases else UNMEASURED

    def cheapest(self, runs: Iterable[MeasuredRun]) -> MeasuredRun | None:
        """The cheapest that did not fail; the first one where several are too close to tell. None without any."""
        done = [run for run in runs if self.cost(run) < UNMEASURED]
        costs = clamped([(self.cost(run), run.noise) for run in done])
        return min(zip(costs, range(len(done)), done, strict=True), default=(0, 0, None))[2]

    def of_backend(self, request: PlanRequest, kv_kind: str, candidate: Candidate) -> MeasuredRun | None:
        """The cheapest run with a candidate for layers of a kind, under what the request fixes; None without one."""
        size = request.block_size.value
        if request.graphs.value not in (AUTO, self.aim):
            return None
        runs = [
            run
            for run in self.runs
            if run.backends.get(kv_kind) == candidate.name
            and run.versions.get(candidate.name) == candidate.version
            and run.aim == self.aim
            and size in (AUTO, run.block_size)
        ]
        return min(runs, key=self.cost, default=None)

    def of_modes(self, backends: Mapping[str, str], block_size: int) -> list[MeasuredRun]:
        """What was timed with these backends and this block size, by the cost of the graph mode."""
        same = (run for run in self.runs if run.backends == backends and run.block_size == block_size and run.seconds)
        return sorted(same, key=self.cost)

    def best(self, request: PlanRequest, candidates: Sequence[Candidate]) -> MeasuredRun | None:
        """The cheapest run that the request allows and whose backends are still the same; None without one."""
        versions = {item.name: item.version for item in candidates}
        return self.cheapest(run for run in self.runs if _allowed(run, request, versions))


def with_measurements(request: PlanRequest, measured: Measured | None, candidates: Sequence[Candidate]) -> PlanRequest:
    """The request with figures to choose by, and with the block size and graph mode that ``auto`` starts from."""
    if measured is None:
        return request
    best = measured.best(request, candidates)
    if best is None:
        return evolve(request, measured=measured)
    sizes: dict[str, Any] = {"default_block_size": best.block_size, "timed_block_size": True}
    return evolve(request, measured=measured, auto_graphs=best.aim, **sizes)


def clamped(costs: Sequence[tuple[int, float]]) -> list[int]:
    """Costs, each given with its noise, with those that differ too little from the lowest made equal to it."""
    lowest, around = min(costs, default=(0, 0.0))
    return [lowest if cost <= lowest * (1 + max(TIE, around, noise)) else cost for cost, noise in costs]


def in_words(nanoseconds: int) -> str:
    """A time with three digits: ``1.02 ms``."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds} ns"


def figures(run: MeasuredRun, cases: Iterable[str]) -> str:
    """The times of some cases: ``decode 1 1.01 ms, mixed 64 2.3 ms``."""
    return ", ".join(f"{case} {in_words(round(run.seconds[case] * 1e9))}" for case in cases)


def told_cases(measured: Measured) -> tuple[str, ...]:
    """The cases that stand for the others where there is little room: the smallest decode batch and the mixed one."""
    first = [case for case in measured.cases if case.startswith("decode")][:1]
    return (*first, *(case for case in measured.cases if case.startswith("mixed")))


def _allowed(run: MeasuredRun, request: PlanRequest, versions: Mapping[str, str]) -> bool:
    if not run.seconds or request.graphs.value not in (AUTO, run.graphs, run.aim):
        return False
    if request.block_size.value not in (AUTO, run.block_size):
        return False
    for kind, name in run.backends.items():
        asked = request.backend_for(kind).value
        if run.versions.get(name) != versions.get(name, "") or (asked and name not in asked and AUTO not in asked):
            return False
    return {group.kv_kind for group in request.groups} == set(run.backends)


def to_json(measured: Measured) -> dict[str, Any]:
    """As JSON types."""
    return {
        "date": measured.date,
        "dtype": measured.dtype,
        "kv_dtype": measured.kv_dtype,
        "aim": measured.aim,
        "runs": [
            {
                "backends": dict(run.backends),
                "versions": dict(run.versions),
                "block_size": run.block_size,
                "graphs": run.graphs,
                "aim": run.aim,
                "seconds": dict(run.seconds),
                "noise": run.noise,
                "failure": run.failure,
            }
            for run in measured.runs
        ],
    }


def from_json(record: Mapping[str, Any], source: str = "") -> Measured:
    """What `to_json` wrote.

    Raises:
        KeyError, TypeError: if it is something else.
    """
    runs = tuple(MeasuredRun(**run) for run in record["runs"])
    fields = {name: record[name] for name in ("date", "dtype", "kv_dtype", "aim")}
    return Measured(**fields, runs=runs, source=source)
