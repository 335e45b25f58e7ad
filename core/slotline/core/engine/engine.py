"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from attrs import define, evolve, field, frozen

from slotline.core.api.outputs import RequestOutput
from slotline.core.api.prompts import as_token_array
from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.core.batch.request import UNSAMPLED, Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import ForwardOutput
from slotline.core.device.out_of_memory import is_out_of_memory
from slotline.core.engine.admission_hooks import AdmissionHooks
from slotline.core.engine.engine_lock import EngineLock, exclusive
from slotline.core.engine.input_processor import InputProcessor
from slotline.core.engine.output_builder import request_output
from slotline.core.engine.output_processor import OutputProcessor, StepResult, joined
from slotline.core.engine.recovery import Recovery
from slotline.core.engine.request_finalizer import RequestFinalizer
from slotline.core.engine.stop_checker import StopChecker
from slotline.core.model_runner.graph_runner import GraphRunner
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.core.model_runner.step_profiler import StepProfiler
from slotline.core.sampling.logits_processors import ProcessorPipeline
from slotline.core.scheduler.admission import EngineLimits
from slotline.core.scheduler.integrity import check_integrity
from slotline.core.scheduler.scheduler import Scheduler
from slotline.kernels.device_scope import on_device
from slotline.registry.attribution import BuiltPlugins, names_plugins
from slotline.registry.contracts import CompiledKernel, KernelCompiler, ResponseParser
from slotline.registry.contracts.prefix_groups import PrefixFinder
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.engine_reports import MemoryReport
from slotline.registry.errors import CapacityError, IntegrityError, RequestError, SlotlineError
from slotline.registry.loading import one_line
from slotline.registry.own_process import OwnProcess
from slotline.text.tokenizer import Tokenizer, with_bad_words

if TYPE_CHECKING:
    from slotline.registry.negotiation import Plan

Int = npt.NDArray[np.int64]
P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger("slotline")


@frozen(kw_only=True, eq=False)
class PendingStep:
    """Step whose results have not been handed out.

    Attributes:
        schedule: its rows and tokens.
        generations: [max_requests] int64, of all rows when it was started. If a row's generation has changed, its
            request was preempted or finished, and the row's results are discarded.
        sampling: its tokens, as the output head gives them.
    """

    schedule: SchedulerOutput
    generations: Int
    sampling: Any


@define(kw_only=True, eq=False, slots=False)
class Engine:
    """Engine that schedules, runs and hands out steps, and owns the rows, the cache and the built parts.

    Under asynchronous scheduling a step is scheduled, gathered and launched while the previous step still runs. Only
    then are the previous step's results handed out. The tokens of a step in flight are counted in the rows as if all
    that it verifies were accepted, and only the device knows them. A request that turns out to have ended took part in
    one step too many, whose result is dropped. With `turns`, so many steps of different requests are in flight. One is
    handed out before another with the same rows is sampled.

    Several threads may use an engine: each call waits until no other thread is in it. A callback of a step, for
    instance a function on logits, may call it again.

    If any exception escapes from a step, Ctrl-C included, every unfinished request is restored before it is raised
    again.

    Attributes:
        notes: extra remarks shown with the plan.
        plugins: the objects that factories made, used to trace errors to plugins.
        sampling_defaults: by the names of `SamplingParams`, defaults for values that a request leaves out. `LLM` puts
            them into the parameters. `add` takes the parameters as they are.
        device: the current one while the engine works.
        extensions: methods of the step extensions.
        turns: steps that may be in flight, one less if they are not prepared before tokens are known.
        check: whether the integrity checker runs after each step.
        response_parser: reads the answers of chats. None if no parser fits the model.
        startup: the seconds of each phase of building: plan, weights, profile, warm_up, compile, capture.
        compiler: the device's compiler of kernels, if launches may wait for one.
        late_kernels: kernels that steps had to wait for while they were compiled or loaded from a cache on disk.
        requests: the unfinished, by id.
        intake, joining, hand_out, endings: the handlers of a request, in the order of its life.
        recovery: restores the unfinished requests after an exception escaped.
        lock: held by the thread that is in the engine.
        unsettled: whether a step runs. If it is set while no step can be running, the last call was interrupted.
    """

    plan: Plan
    rows: RequestTable
    scheduler: Scheduler
    gatherer: InputPreparer
    runner: ModelRunner
    pipeline: ProcessorPipeline
    profiler: StepProfiler
    limits: EngineLimits
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    response_parser: ResponseParser | None = None
    memory: MemoryReport | None = None
    notes: tuple[str, ...] = ()
    plugins: BuiltPlugins = field(factory=BuiltPlugins)
    sampling_defaults: Mapping[str, Any] = field(factory=dict)
    device: str = "cpu"
    graphs: GraphRunner | None = None
    cascade: PrefixFinder | None = None
    extensions: Extensions = NO_EXTENSIONS
    asynchronous: bool = False
    turns: int = 1
    compiler: KernelCompiler | None = None
    check: bool = False
    startup: Mapping[str, float] = field(factory=dict)
    late_kernels: list[CompiledKernel] = field(factory=list, init=False)
    requests: dict[str, Request] = field(factory=dict, init=False)
    intake: InputProcessor = field(init=False)
    joining: AdmissionHooks = field(init=False)
    hand_out: OutputProcessor = field(init=False)
    endings: RequestFinalizer = field(init=False)
    recovery: Recovery = field(init=False)
    lock: EngineLock = field(factory=EngineLock, init=False)
    _in_flight: deque[PendingStep] = field(factory=deque, init=False)  # the oldest first
    _log: list[CompiledKernel] = field(factory=list, init=False)  # of this step
    _ended: list[Request] = field(factory=list, init=False)  # and not yet in a step's result
    unsettled: bool = field(default=False, init=False)
    _hurt: bool = field(default=False, init=False)  # a call was interrupted
    _closed: bool = field(default=False, init=False)  # while rows and requests change: no callback may step then
    _aborts: list[Request] = field(factory=list, init=False)  # asked for while closed
    _own_process: OwnProcess = field(factory=lambda: OwnProcess("the engine"), init=False)

    def __attrs_post_init__(self) -> None:
        stops = StopChecker(self.rows, self.eos_token_ids, self.limits.vocab_size)
        self.endings = RequestFinalizer(
            requests=self.requests,
            scheduler=self.scheduler,
            stops=stops,
            tokenizer=self.tokenizer,
            pipeline=self.pipeline,
            plugins=self.plugins,
            extensions=self.extensions,
        )
        self.intake = InputProcessor(
            requests=self.requests,
            scheduler=self.scheduler,
            limits=self.limits,
            tokenizer=self.tokenizer,
            pipeline=self.pipeline,
            extensions=self.extensions,
        )
        self.joining = AdmissionHooks(
            endings=self.endings,
            pipeline=self.pipeline,
            extensions=self.extensions,
        )
        self.hand_out = OutputProcessor(
            rows=self.rows,
            scheduler=self.scheduler,
            stops=stops,
            endings=self.endings,
            overlapped=self.runner.last_tokens is not None and self.runner.last_tokens.max_spec_tokens > 0,
            extensions=self.extensions,
        )
        self.recovery = Recovery(
            requests=self.requests,
            scheduler=self.scheduler,
            hand_out=self.hand_out,
            endings=self.endings,
            tokenizer=self.tokenizer,
            pipeline=self.pipeline,
            extensions=self.extensions,
        )

    @property
    def has_work(self) -> bool:
        """True if any request is unfinished."""
        return bool(self.requests)

    @names_plugins
    @exclusive
    @on_device
    def add(
        self: Engine,
        /,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: Any,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        index: int = 0,
        stream: bool = False,
        arrival: int | None = None,
        **inputs: Any,
    ) -> Request:
        """Check a request and queue it.

        Args:
            params: `SamplingParams`, or parameters of the engine's task.
            stream: whether its text is read while it runs.
            arrival: its number, which decides its seed if it has none, and its order. None for the next.
            inputs: what extensions of this engine take, by name.

        Raises:
            RequestError: naming the error, also in a forked child. Nothing is queued then, and the engine goes on.
        """
        self._own_process.refuse_others()
        sampling, other = (params, None) if isinstance(params, SamplingParams) else (UNSAMPLED, params)
        if sampling.bad_words:
            sampling = with_bad_words(sampling, self.tokenizer)
        tokens = as_token_array(prompt_token_ids)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens.tolist(),
            token_array=tokens,
            params=sampling,
            task_params=other,
            prompt=prompt,
            priority=priority,
            cache_salt=cache_salt,
            index=index,
            arrival=self.intake.arrivals if arrival is None else arrival,
            inputs=inputs,
        )
        try:
            for prepare in self.extensions.prepare_request:
                prepare(request)
            self.intake.add(request, stream=stream)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._hurt = self.unsettled = True
            raise
        return request

    @names_plugins
    @exclusive
    @on_device
    def abort(self, request_id: str) -> Request | None:
        """End a request now. It keeps its output so far. Return None if no such request is unfinished.

        If a signal's handler or a plugin calls this in the middle of a step's bookkeeping, the request ends with the
        step.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._aborts.append(request)
            self._abort_asked()
        return request

    @exclusive
    @on_device
    def exclusively(self, call: Callable[P, R], /, *args: P.args, **options: P.kwargs) -> R:
        """Make a call while no step runs and no other thread is in the engine, to use the engine's parts."""
        return call(*args, **options)

    @names_plugins
    @exclusive
    @on_device
    def everywhere(self, call: str, /, *given: Any) -> Any:
        """Call a method of an extension, by ``name.method``, while no step runs. All ranks make the call.

        Args:
            given: can be pickled.
        """
        name, _, method = call.partition(".")
        return getattr(self.extension(name), method)(*given)

    @names_plugins
    @exclusive
    @on_device
    def reload_weights(self, path: Path | None = None) -> None:
        """Read the weights again, in place, and forget the prefixes that the old ones computed.

        Args:
            path: another checkpoint's folder, None for the same one.

        Raises:
            RequestError: if a request is unfinished, since its keys and values are those of the old weights.
            RequestError: if an extension cannot add to the new weights what it had added to the old ones. They stay
                without it then.
            ModelError: if the weights do not fit. The old weights stay.
        """
        if self.requests:
            raise RequestError(f"{len(self.requests)} requests are unfinished", fix="finish or abort them first")
        self.runner.model.reload_weights(path)
        self.forget_prefixes()

    @exclusive
    def forget_prefixes(self) -> None:
        """Forget what the cache holds of requests that ended, so that none is found again."""
        self.scheduler.cache.reset()
        for reset in self.extensions.reset:
            reset()

    @names_plugins
    @exclusive
    def step(self) -> StepResult:
        """Run one step over everything that is ready.

        Raises:
            CapacityError: if memory ends in the step.
            RequestError: if the engine is in the middle of another step's bookkeeping, as in a signal's handler.
        """
        if getpid() != self._own_process.process:
            self._own_process.refuse_others()
        if self._closed:
            raise RequestError(
                "a step inside another step's bookkeeping", fix="step from a function on logits, or later"
            )
        outermost, self.unsettled = not self.unsettled, True
        outer_log = None if self.compiler is None else self.compiler.log_to(self._log)
        try:
            result = self._step_on_device() if ":" in self.device else self._step()
            if self._log and self.compiler is not None:
                self._note_late(self.compiler)
            if self.check and outermost:
                self._check()
            return result
        except BaseException as error:
            self._hurt |= not isinstance(error, IntegrityError)  # the checker looks at steps that are complete
            if is_out_of_memory(error) and not isinstance(error, SlotlineError):
                raise CapacityError(
                    f"a step does not fit into memory beside the cache: {one_line(error)}",
                    fix="lower cache.memory, scheduler.max_batched_tokens or scheduler.max_requests",
                ) from error
            raise
        finally:
            if self.compiler is not None:
                self.compiler.log_to(outer_log)
            self._closed = False
            if outermost and self._hurt:
                self.settle()
            elif outermost:
                self.unsettled = False
            if self._aborts:
                self._abort_asked()

    @on_device
    def settle(self) -> None:
        """Restore every unfinished request after a call was interrupted. No step may be running."""
        self._hurt = self.unsettled = self._closed = True
        self._in_flight.clear()
        self._ended += self.recovery.run()
        self._hurt = self.unsettled = self._closed = False

    @on_device
    def _step_on_device(self) -> StepResult:
        return self._step()

    def _note_late(self, compiler: KernelCompiler) -> None:
        """Note the kernels that the step had to wait for."""
        late = self._log.copy()
        self._log.clear()
        compiler.waited_for(late)
        self.late_kernels += late

    def _step(self) -> StepResult:
        """Schedule, launch and hand out, see `step`."""
        self._closed = True
        with self.profiler.scope("schedule"):
            unfit = self._queue_ready() if self.extensions.collect_ready else []
            schedule = self.scheduler.schedule()
        self._ended += unfit
        if schedule.admitted or schedule.failed:
            schedule, refused = self.joining.prepare(schedule)
            self._ended += refused
        for before in self.extensions.before_step:
            schedule = before(schedule)
        if schedule.failed:
            schedule, refused = self.joining.leave_out(schedule)
            self._ended += refused
        generations = self.rows.generation.copy()
        launched = self._launch(schedule) if schedule.num_tokens else None
        result = self._collect_before(schedule.rows) if self._in_flight else None
        if launched is not None:
            number = len(self._in_flight)
            started = self._sample(launched, schedule, generations)
            while len(self._in_flight) > number:  # a step that was run by a callback of this one
                self._collect()
            self._in_flight.append(started)
            if not self.asynchronous and len(self._in_flight) == self.turns:
                result = self._collect() if result is None else joined(result, self._collect())
        result = result or StepResult()
        ended, self._ended = self._ended, []
        return evolve(result, finished=ended) if ended or result.finished else result

    def _check(self) -> None:
        rows = [step.schedule.rows for step in self._in_flight]
        check_integrity(self.scheduler, np.concatenate(rows) if rows else ())

    @exclusive
    def output(self, requests: Sequence[Request]) -> RequestOutput:
        """Return the public form of a prompt's requests (one per output)."""
        return request_output(requests, self.rows, self.tokenizer)

    def extension(self, name: str) -> Any:
        """Return the extension of a name, None if this engine has none."""
        return self.extensions.named.get(name)

    def _queue_ready(self) -> list[Request]:
        """Queue the deferred requests that are ready. Return those that ended with an error."""
        idle = not self._in_flight and not self.scheduler.running and not self.scheduler.num_waiting
        failed: list[tuple[Request, BaseException]] = []
        for collect in self.extensions.collect_ready:
            ready, errors = collect(idle=idle, gives_way=lambda: bool(self.lock.line))
            if ready:
                self.intake.queue_ready(ready)
            failed += errors
        if failed:
            self.endings.fail(failed)
        return [request for request, _ in failed]

    def _launch(self, schedule: SchedulerOutput) -> ForwardOutput:
        """Gather a step's inputs and start its forward pass."""
        with self.profiler.scope("gather"):
            prefixes = None if self.cascade is None else self.cascade.of_step(schedule)
            variant = 0
            for choose in self.extensions.graph_variant:
                variant = choose(schedule.rows)
            shape = None
            if self.graphs is not None:
                kind = 0 if prefixes is None else prefixes.kind
                shape = self._graph_shape(self.graphs, schedule, cascade=kind, variant=variant)
            variant = variant if shape is None else shape.variant
            inputs = self.gatherer.gather(schedule, shape, prefixes, variant=variant)
        for prepare in self.extensions.prepare_inputs:
            inputs = prepare(inputs)
        launched = self.runner.launch(inputs)
        self.rows.num_computed_tokens[schedule.rows] += schedule.num_scheduled
        for note in self.extensions.launched:
            note(schedule)
        return launched

    def _graph_shape(
        self, graphs: GraphRunner, schedule: SchedulerOutput, *, cascade: int, variant: int
    ) -> GraphShape | None:
        """Return the captured shape of a step, or None to run eagerly."""
        for needs_eager in self.extensions.needs_eager:
            if needs_eager(schedule):
                return None
        return graphs.shapes.shape_for(schedule, cascade=cascade, variant=variant)

    def _sample(self, launched: ForwardOutput, schedule: SchedulerOutput, generations: Int) -> PendingStep:
        """Start sampling after a forward pass. All earlier tokens are known by now."""
        for settle in self.extensions.settle_step:
            launched, schedule = settle(launched, schedule, generations)
        sampling, inputs = self._open_sample(launched), launched.inputs
        for extend in self.extensions.extend_pending:
            sampling = extend(sampling)
        if (last_tokens := self.runner.last_tokens) is not None:
            rows, verified = inputs.logits_rows, inputs.num_verified
            if inputs.spec_positions is not None:
                rows = rows[inputs.spec_positions == 0]
            going = self.rows.generation[rows] == generations[rows]
            if not going.all():
                rows, verified = rows[going], None if verified is None else verified[going]
            self.rows.reserve_pending(rows, last_tokens.stand_ins(rows), 0 if verified is None else verified)
        return PendingStep(schedule=schedule, generations=generations, sampling=sampling)

    def _open_sample(self, launched: ForwardOutput) -> Any:
        """Start sampling. Functions on logits may use the engine meanwhile."""
        self._closed = False
        sampling = self.runner.head.start(launched)
        self._closed = True
        return sampling

    def _abort_asked(self) -> None:
        """End the requests that `abort` was called for, unless rows and requests are changing."""
        if self._closed or not self._aborts:
            return
        before = self._hurt, self.unsettled
        self._hurt = self.unsettled = self._closed = True
        while self._aborts:
            request = self._aborts.pop(0)
            if self.requests.get(request.request_id) is request:
                self.endings.finish([request], ["abort"], [None])
        (self._hurt, self.unsettled), self._closed = before, False

    def _collect_before(self, rows: Int) -> StepResult:
        """Hand out the steps in flight that a step of `rows` follows, or the oldest one if there are none of its."""
        number = len(self._in_flight) - self.turns + 1
        if self.turns > 1:
            number = max(number, 0 if len(rows) else 1)
            for place, step in enumerate(self._in_flight, 1):
                number = place if np.isin(step.schedule.rows, rows).any() else number
        result = self._collect() if number else StepResult()
        for _ in range(1, number):
            result = joined(result, self._collect())
        return result

    def _collect(self) -> StepResult:
        """Wait for the oldest step in flight, if any, and hand its results out."""
        if not self._in_flight:  # a callback of the step has
            return StepResult()
        step = self._in_flight.popleft()
        output = self.runner.head.finish(step.sampling)
        for spoiled in self.extensions.recompute:
            self.scheduler.recompute(spoiled())
        with self.profiler.scope("hand_out"):
            kept, schedule = output, step.schedule
            if not np.array_equal(self.rows.generation, step.generations):
                given_up = np.flatnonzero(self.rows.generation != step.generations)
                kept, schedule = output.without(given_up), schedule.without(given_up)
            for commit in self.extensions.commit:
                commit(kept)
            result = self.hand_out(schedule, kept)
        self._ended += result.finished
        for after in self.extensions.after_step:
            after(output, step.generations)
        return result
