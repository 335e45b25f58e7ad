"""Builds, times and tears down one engine after the other, and picks the best."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from slotline.builder.engine_builder import EngineBuilder
from slotline.cli.tuning.cases import Cases
from slotline.cli.tuning.timing import Timing, time_cases
from slotline.cli.tuning.trials import (
    Trial,
    backend_trial,
    backend_trials,
    backends_of,
    block_size_trials,
    graph_trials,
    refused_backends,
)
from slotline.core.engine.engine import Engine
from slotline.kernels.device_scope import device_scope
from slotline.planner.measurements import planned_cache
from slotline.planner.plan import Planned, make_plan
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import Model
from slotline.registry.errors import NegotiationError, PluginError, SlotlineError
from slotline.registry.negotiation import Measured, MeasuredRun, Plan
from slotline.registry.negotiation.request import AUTO_GRAPHS

logger = logging.getLogger("slotline")
WORTH_A_BLOCK_SIZE = 1.5
"""Other block sizes are tried for backends that take at most this multiple of the best time."""

Configure = Callable[[Mapping[str, Any]], LoadedConfig]
Counted = Callable[[list[Trial], str], Iterable[Trial]]


@frozen(kw_only=True)
class Outcome:
    """Result of a trial.

    Attributes:
        trial: the trial.
        run: the record that negotiation reads, None if there was no plan.
        timings: by case. skipped: cases without room, with the reason.
        failure: the reason why there are no timings.
        seconds: to build, time and tear down. capture: the cost of graphs as JSON types, None without graphs.
        leaked: bytes of device memory still allocated afterwards beyond those before.
    """

    trial: Trial
    run: MeasuredRun | None = None
    timings: Mapping[str, Timing] = field(factory=dict)
    skipped: Mapping[str, str] = field(factory=dict)
    failure: str = ""
    seconds: float = 0.0
    capture: Mapping[str, Any] | None = None
    leaked: int = 0


@frozen(kw_only=True)
class Tuning:
    """The result.

    Attributes:
        base: the plan that trials vary.
        measured: every run, for negotiation.
        outcomes: of all trials, in order.
        refused: (setting, reason) of everything that negotiation ruled out.
        best: the cheapest run, None if all failed.
    """

    base: Planned
    measured: Measured
    outcomes: tuple[Outcome, ...]
    refused: tuple[tuple[str, str], ...]
    best: MeasuredRun | None


@define(eq=False)
class Tuner:
    """Times the settings that a configuration leaves open.

    Attributes:
        configure: the configuration with further settings.
        cases: the timed cases.
        date: for the record, as in ``2026-11-21``.
        counted: wraps trials to show progress.
    """

    configure: Configure
    cases: Cases
    date: str
    counted: Counted = field(default=lambda trials, label: trials)
    _outcomes: list[Outcome] = field(factory=list, init=False)
    _refused: list[tuple[str, str]] = field(factory=list, init=False)
    _model: Model | None = field(default=None, init=False)
    _pair: tuple[str, str] = field(default=("", ""), init=False)

    def run(self) -> Tuning:
        """Try backends first, then block sizes of the good ones, then graph modes of the best.

        Raises:
            SlotlineError: if not even a plan for the configuration as it is can be made, or if it has stages.
        """
        planned = make_plan(self.configure({}), use_measurements=False)
        plan, origins = planned.plan, planned.loaded.origins
        if plan.stages:
            raise NegotiationError(
                f"{len(plan.stages)} pipeline stages: what is measured is kept for the model on one device",
                fix="remove parallel.pipeline; what was measured on one device counts for stages too",
            )
        aim, self._pair = _aim(plan), (plan.dtype, plan.kv_dtype)
        self._refused += refused_backends(plan)
        self._try("backends", list(backend_trials(plan)), aim)
        self._combine(plan, aim)
        if origins["cache.block_size"].kind == "default":
            self._try_block_sizes(aim)
        best = self._best(aim)
        if best is not None and plan.graphs.resolved != "none" and origins["graphs.mode"].kind == "default":
            self._try("graph modes", list(graph_trials(best.backends, best.block_size, aim)), None)
        self._model = None
        return Tuning(
            base=planned,
            measured=self._measured(plan, aim),
            outcomes=tuple(self._outcomes),
            refused=tuple(dict.fromkeys(self._refused)),
            best=self._best(aim),
        )

    def _combine(self, plan: Plan, aim: str) -> None:
        """Try the best backends of the kinds of layers together, if these differ."""
        measured = self._measured(plan, aim)
        base, chosen = backends_of(plan), {}
        for kind, own in base.items():
            best = measured.cheapest(run for run in measured.runs if {**run.backends, kind: own} == base)
            chosen[kind] = own if best is None else best.backends[kind]
        if all(run.backends != chosen for run in measured.runs):
            self._try("backends", [backend_trial(chosen)], aim)

    def _try_block_sizes(self, aim: str) -> None:
        done = [outcome.run for outcome in self._outcomes if outcome.run is not None and outcome.run.seconds]
        sizes = sorted({run.block_size for run in done})
        best = self._best(aim)
        if best is None or len(sizes) < 2:
            return
        measured = Measured(date=self.date, dtype="", kv_dtype="", aim=aim, runs=tuple(done))
        near = [run for run in done if measured.cost(run) <= WORTH_A_BLOCK_SIZE * measured.cost(best)]
        trials = [trial for run in near for trial in block_size_trials(run.backends, run.block_size, sizes)]
        self._try("block sizes", trials, aim)

    def _try(self, label: str, trials: list[Trial], aim: str | None) -> None:
        for trial in self.counted(trials, f"tuning {label}"):
            outcome = self._outcome(trial, aim or trial.settings["graphs.mode"])
            if outcome.run is None:
                self._refused.append((trial.describe(), outcome.failure))
            else:
                self._outcomes.append(outcome)

    def _outcome(self, trial: Trial, aim: str) -> Outcome:
        """Plan, build, time and tear down. A failure is an outcome and ends nothing."""
        try:
            planned = make_plan(self.configure(trial.settings), use_measurements=False)
        except SlotlineError as error:
            return Outcome(trial=trial, failure=_first_line(error))
        if (pair := (planned.plan.dtype, planned.plan.kv_dtype)) != self._pair:
            return Outcome(trial=trial, failure=f"would need {'/'.join(pair)}")
        mode = trial.settings.get("graphs.mode", planned.plan.graphs.resolved)
        if planned.plan.graphs.resolved != mode:
            return Outcome(trial=trial, failure=f"resolves to {planned.plan.graphs.resolved}")
        run, start, before = _run_of(planned.plan, aim), perf_counter(), None
        try:
            with device_scope(planned.device):
                model = self._load(planned)
                before = _allocated(planned.device)
                outcome = self._timed(trial, run, planned, model)
        except Exception as error:  # a plugin may fail in any way, and the others are still to be measured
            logger.debug("a trial failed", exc_info=True)
            failure = _first_line(error)
            outcome = Outcome(trial=trial, run=evolve(run, failure=failure), failure=failure)
        leaked = 0 if before is None else _allocated(planned.device) - before
        return evolve(outcome, seconds=perf_counter() - start, leaked=max(0, leaked))

    def _timed(self, trial: Trial, run: MeasuredRun, planned: Planned, model: Model) -> Outcome:
        engine: Engine = EngineBuilder(planned).build(model)
        timings, skipped = time_cases(engine, self.cases)
        seconds = {case: timing.median for case, timing in timings.items()}
        noise = median(timing.spread / 2 for timing in timings.values())
        capture = engine.graphs.report.to_json() if engine.graphs else None
        return Outcome(
            trial=trial,
            run=evolve(run, seconds=seconds, noise=noise),
            timings=timings,
            skipped=skipped,
            capture=capture,
        )

    def _load(self, planned: Planned) -> Model:
        """Load the weights. One model serves all engines."""
        if self._model is None:
            self._model = EngineBuilder(planned).load_model()
        return self._model

    def _measured(self, plan: Plan, aim: str) -> Measured:
        runs = tuple(outcome.run for outcome in self._outcomes if outcome.run is not None)
        return Measured(date=self.date, dtype=plan.dtype, kv_dtype=planned_cache(plan), aim=aim, runs=runs)

    def _best(self, aim: str) -> MeasuredRun | None:
        runs = tuple(outcome.run for outcome in self._outcomes if outcome.run is not None)
        measured = Measured(date=self.date, dtype="", kv_dtype="", aim=aim, runs=runs)
        return measured.cheapest(runs)


def _run_of(plan: Plan, aim: str) -> MeasuredRun:
    return MeasuredRun(
        backends=backends_of(plan),
        versions={group.backend: group.version for group in plan.groups},
        block_size=plan.block_size,
        graphs=plan.graphs.resolved,
        aim=aim,
    )


def _aim(plan: Plan) -> str:
    """Return the graph mode under which backends are compared."""
    if plan.graphs.resolved == "none":
        return "none"
    return AUTO_GRAPHS if plan.graphs.asked == "auto" else plan.graphs.asked


def _allocated(device: str) -> int:
    """Return the bytes of device memory in use once everything unreachable is freed."""
    gc.collect()
    if not device.startswith("cuda"):
        return 0
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream that ever captured, which no engine holds
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def _first_line(error: BaseException) -> str:
    """Return why a candidate failed. The row names the candidate, so that the plugin need not be named again."""
    if isinstance(error, PluginError) and error.__cause__ is not None:
        error = error.__cause__
    text = error.message if isinstance(error, SlotlineError) else f"{type(error).__name__}: {error}"
    if isinstance(error, NegotiationError) and error.reasons:
        text = "; ".join(dict.fromkeys(f"{reason.code} {reason.text}" for reason in error.reasons))
    return (text.splitlines() or [type(error).__name__])[0]
