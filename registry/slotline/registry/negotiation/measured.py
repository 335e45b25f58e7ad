"""Measured costs: the times of `slotline tune`, in the form in which negotiation compares candidates.

A run is one engine on one machine with its backends, block size and graph mode, and the median time of a step in each
case. Its cost is the geometric mean over the cases, so that ratios count instead of absolute times.
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
    """Engine that was measured, or that failed.

    Attributes:
        backends: cache kind -> backend.
        versions: backend -> version of its distribution.
        block_size: block size of the pool.
        graphs: the resolved graph mode.
        aim: the mode that was requested, or that ``auto`` aimed at.
        seconds: case (``decode 64``) -> median time of a step. Empty if the run failed.
        noise: half the interquartile range of the samples relative to their median. The median over the cases.
        failure: the reason of a failure, in one line.
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
        """Return the geometric mean of the cases' seconds."""
        logs = [log(self.seconds[case]) for case in cases]
        return exp(sum(logs) / len(logs))


@frozen(kw_only=True)
class Measured:
    """All runs for one model on one device.

    Attributes:
        date: date of the measurement, as in ``2026-11-21``.
        dtype, kv_dtype: the measured pair.
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
        """Cases that every successful run has."""
        done = [run for run in self.runs if run.seconds]
        return tuple(case for case in (done[0].seconds if done else ()) if all(case in run.seconds for run in done))

    @property
    def origin(self) -> str:
        """Source of the measured times, for a reader."""
        return f"slotline tune {self.date}"

    def cost(self, run: MeasuredRun) -> int:
        """Return the nanoseconds of a step, averaged over the cases. `UNMEASURED` for a failed run."""
        return round(run.mean(self.cases) * 1e9) if run.seconds and self.cases else UNMEASURED

    def cheapest(self, runs: Iterable[MeasuredRun]) -> MeasuredRun | None:
        """Return the fastest successful run, or None.

        If several runs are too close to distinguish, the first one is returned.
        """
        done = [run for run in runs if self.cost(run) < UNMEASURED]
        costs = clamped([(self.cost(run), run.noise) for run in done])
        return min(zip(costs, range(len(done)), done, strict=True), default=(0, 0, None))[2]

    def of_backend(self, request: PlanRequest, kv_kind: str, candidate: Candidate) -> MeasuredRun | None:
        """Return the fastest run with a candidate for layers of a kind, under the request's fixed settings, or None."""
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
        """Return the runs with these backends and this block size, ordered by the cost of their graph mode."""
        same = (run for run in self.runs if run.backends == backends and run.block_size == block_size and run.seconds)
        return sorted(same, key=self.cost)

    def best(self, request: PlanRequest, candidates: Sequence[Candidate]) -> MeasuredRun | None:
        """Return the fastest run that the request allows and whose backends are unchanged, or None."""
        versions = {item.name: item.version for item in candidates}
        return self.cheapest(run for run in self.runs if _allowed(run, request, versions))


def with_measurements(request: PlanRequest, measured: Measured | None, candidates: Sequence[Candidate]) -> PlanRequest:
    """Return the request with measured costs, and with the block size and graph mode that ``auto`` starts from."""
    if measured is None:
        return request
    best = measured.best(request, candidates)
    if best is None:
        return evolve(request, measured=measured)
    sizes: dict[str, Any] = {"default_block_size": best.block_size, "timed_block_size": True}
    return evolve(request, measured=measured, auto_graphs=best.aim, **sizes)


def clamped(costs: Sequence[tuple[int, float]]) -> list[int]:
    """Return the costs, with those that differ from the lowest by less than the noise set equal to it."""
    lowest, around = min(costs, default=(0, 0.0))
    return [lowest if cost <= lowest * (1 + max(TIE, around, noise)) else cost for cost, noise in costs]


def in_words(nanoseconds: int) -> str:
    """Return a time with three digits: ``1.02 ms``."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds} ns"


def figures(run: MeasuredRun, cases: Iterable[str]) -> str:
    """Return the times of some cases: ``decode 1 1.01 ms, mixed 64 2.3 ms``."""
    return ", ".join(f"{case} {in_words(round(run.seconds[case] * 1e9))}" for case in cases)


def told_cases(measured: Measured) -> tuple[str, ...]:
    """Return the cases to show if space is limited: the smallest decode batch and the mixed batch."""
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
    """Return the measurements as JSON types."""
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
    """Return the measurements that `to_json` wrote.

    Raises:
        KeyError, TypeError: if the record has another form.
    """
    runs = tuple(MeasuredRun(**run) for run in record["runs"])
    fields = {name: record[name] for name in ("date", "dtype", "kv_dtype", "aim")}
    return Measured(**fields, runs=runs, source=source)
