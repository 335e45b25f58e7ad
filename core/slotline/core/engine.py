"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from attrs import define, evolve, field

from slotline.core.adapters.source import AdapterSource
from slotline.core.building.memory import MemoryReport
from slotline.core.cache.cascade import Cascade
from slotline.core.drafting.drafting import Drafting
from slotline.core.drafting.overlap import Overlap, Proposal
from slotline.core.execution.encoding import Encoding
from slotline.core.execution.graphs import GraphRunner
from slotline.core.execution.inputs import GraphShape, InputGatherer
from slotline.core.execution.profiling import StepProfiler
from slotline.core.execution.runner import Runner
from slotline.core.execution.step import Answers, Launched, Sampling, StepOutput
from slotline.core.frontend.detokenizer import Detokenizer
from slotline.core.frontend.lora_request import LoRARequest
from slotline.core.frontend.multimodal import Feature
from slotline.core.frontend.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    TokenLogprobs,
)
from slotline.core.frontend.prompts import as_token_ids
from slotline.core.frontend.sampling_params import SamplingParams
from slotline.core.frontend.tokenizer import Tokenizer, with_bad_words
from slotline.core.planning.device import on_device
from slotline.core.sampling.logprobs import with_text
from slotline.core.sampling.pooling import Pooling, params_by_task, pooling_output
from slotline.core.sampling.processors import ProcessorPipeline
from slotline.core.sampling.structured_output import StructuredOutputs
from slotline.core.scheduling.admission import EngineLimits, check_capacity, check_request
from slotline.core.scheduling.guidance import check_pair_capacity, leaders, pair, refuse_guidance, with_partners
from slotline.core.scheduling.integrity import check_integrity
from slotline.core.scheduling.request import Request, Status
from slotline.core.scheduling.rows import Rows
from slotline.core.scheduling.scheduler import Schedule, Scheduler
from slotline.registry.contracts import PoolingParams
from slotline.registry.errors import RequestError

if TYPE_CHECKING:
    from slotline.registry.negotiation import Plan

Int = npt.NDArray[np.int64]
logger = logging.getLogger("slotline")


@define(kw_only=True, eq=False)
class StepResult:
    """What a step handed out.

    Attributes:
        rows: [n] int64, rows that got a token, but for those of negative prompts; `token_ids` [n] int32. Under
            asynchronous scheduling those of the step that was started one call before.
        finished: requests that ended in this step; they hold no row any more.
    """

    rows: Int = field(factory=lambda: np.zeros(0, np.int64))
    token_ids: npt.NDArray[np.int32] = field(factory=lambda: np.zeros(0, np.int32))
    finished: list[Request] = field(factory=list)


@define(kw_only=True, eq=False)
class InFlight:
    """A step whose results have not been handed out.

    Attributes:
        schedule: what it computes.
        generations: [max_requests] int64, of all rows when it was started; a row whose generation has changed since
            then has been given up, and its results are nobody's.
        sampling: its tokens.
        proposal: the drafts behind them, where the drafter does not wait for the host.
    """

    schedule: Schedule
    generations: Int
    sampling: Sampling | Answers
    proposal: Proposal | None = None


class Engine:
    """Schedules, runs and hands out; owns the rows, the cache and the built parts.

    Under asynchronous scheduling a step is scheduled, gathered and launched while the one before still runs; only then
    are the earlier one's results handed out. The tokens of a step in flight are counted in the rows, as if all its
    drafts stood, and known on the device alone. A request that turns out to have ended took part in one step too many,
    whose result is dropped.

    `startup` holds the seconds of each phase of building: plan, weights, profile, warm_up, capture.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rows: Rows,
        scheduler: Scheduler,
        gatherer: InputGatherer,
        runner: Runner,
        pipeline: ProcessorPipeline,
        profiler: StepProfiler,
        drafting: Drafting | None = None,
        overlap: Overlap | None = None,
        pooling: Pooling | None = None,
        encoding: Encoding | None = None,
        grammars: StructuredOutputs | None = None,
        limits: EngineLimits,
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        memory: MemoryReport | None = None,
        notes: tuple[str, ...] = (),
        device: str = "cpu",
        graphs: GraphRunner | None = None,
        cascade: Cascade | None = None,
        adapters: AdapterSource | None = None,
        asynchronous: bool = False,
        check: bool = False,
        startup: Mapping[str, float] | None = None,
    ) -> None:
        self.plan = plan
        self.rows = rows
        self.scheduler = scheduler
        self.gatherer = gatherer
        self.runner = runner
        self.pipeline = pipeline
        self.profiler = profiler
        self.drafting = drafting
        self.overlap = overlap
        self.pooling = pooling
        self.encoding = encoding
        self.grammars = grammars
        self.limits = limits
        self.tokenizer = tokenizer
        self.memory = memory
        self.notes = notes
        self.device = device
        self.graphs = graphs
        self.cascade = cascade or Cascade([None] * len(gatherer.groups))
        self.checkpoints = scheduler.cache.checkpoints
        self.adapters = adapters
        self.asynchronous = asynchronous
        self.check = check
        self.startup = startup or {}
        self._in_flight: InFlight | None = None
        self.requests: dict[str, Request] = {}
        self._arrivals = 0
        self.eos_token_ids = tuple(eos_token_ids)
        self._is_eos = np.zeros(limits.vocab_size, bool)
        self._is_eos[[token for token in eos_token_ids if token < limits.vocab_size]] = True

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.requests)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | PoolingParams,
        *,
        prompt: str | None = None,
        features: tuple[Feature, ...] = (),
        priority: int = 0,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
        index: int = 0,
        stream: bool = False,
    ) -> Request:
        """Check a request and queue it.

        Args:
            params: of the engine's task.
            features: inputs besides text, as `Encoding.reader` reads them; the prompt holds their placeholders.
            stream: whether its text is read while it runs.

        Raises:
            RequestError: naming what is wrong; nothing is queued then, and the engine goes on.
        """
        sampling, pooling = params_by_task(params, self.pooling, self.limits.tasks)
        if sampling.bad_words:
            sampling = with_bad_words(sampling, self.tokenizer)
        request = Request(
            request_id=request_id,
            prompt_token_ids=as_token_ids(prompt_token_ids),
            params=sampling,
            pooling_params=pooling,
            pools_whole_prompt=self.pooling is not None and self.pooling.whole_prompt,
            prompt=prompt,
            features=features,
            priority=priority,
            cache_salt=cache_salt,
            lora_request=lora_request,
            index=index,
            arrival=self._arrivals,
        )
        self.validate(request)
        if sampling.guided:
            self._add_companion(request)
        if sampling.stop or (stream and sampling.detokenize):
            request.detokenizer = self._detokenizer(request)
        for one in (request, request.companion):
            if one is not None:
                self._enter(one)
                self.requests[one.request_id] = one
        if sampling.structured_outputs is not None and self.grammars is not None:
            self.grammars.compiler.submit(request, sampling.structured_outputs.constraint)
        else:
            self._queue(request)
        self._arrivals += 1 if request.companion is None else 2
        return request

    def validate(self, request: Request) -> None:
        """Refuse what cannot run, before it takes anything.

        Raises:
            RequestError: with the value and the fix.
        """
        check_request(request, self.limits, has_tokenizer=self.tokenizer is not None)
        if request.request_id in self.requests:
            raise RequestError(
                f"request id {request.request_id!r} is in use", fix="use another id, or wait for the first to end"
            )
        check_capacity(request, self.scheduler.cache, self.limits.max_model_len)
        if self.encoding is not None:
            self.encoding.validate(request)
        elif request.features:
            raise RequestError(f"{len(request.features)} features for a model of text alone", fix="leave them out")
        self.pipeline.validate(request)
        if self.grammars is not None:
            self.grammars.validate(request)

    def _add_companion(self, request: Request) -> None:
        """Give a request that asks for guidance the request of its negative prompt."""
        refuse_guidance(
            request,
            self.rows.max_requests,
            drafts=self.drafting is not None,
            chunked_prefill=self.limits.chunked_prefill,
        )
        companion = pair(request, self.tokenizer, self.limits.max_model_len)
        try:
            self.validate(companion)
        except RequestError as error:
            raise RequestError(f"negative_prompt: {error.message}", fix=error.fix) from error
        check_pair_capacity(request, companion, self.scheduler.cache)

    def _queue(self, request: Request) -> None:
        """Queue a request, and its companion with it."""
        self.scheduler.add(request)
        if request.companion is not None:
            self.scheduler.add(request.companion)

    @on_device
    def _enter(self, request: Request) -> None:
        """Check a request's adapter, which is read now if it is new.

        Raises:
            RequestError: if it cannot be used.
        """
        if self.adapters is not None:
            self.adapters.enter(request)
        elif request.lora_request is not None:
            raise RequestError(
                f"adapter {request.lora_request.lora_name!r} in an engine without adapters",
                fix='name a LoRA plugin, for instance lora.name = "torch"',
            )

    @on_device
    def abort(self, request_id: str) -> Request | None:
        """End a request now; what it sampled so far stays in it. None if no such request is unfinished."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish([request], ["abort"], [None])
        return request

    @on_device
    def reload_weights(self, path: Path | None = None) -> None:
        """Read the weights again, in place, and forget the prefixes that the old ones computed.

        Args:
            path: another checkpoint's folder; None for the same one.

        Raises:
            RequestError: if a request is unfinished; its keys and values are the old weights'.
            RequestError: if the merged adapter cannot be merged into the new weights, which stay without it then.
            ModelError: if the weights do not fit; the old ones stay.
        """
        if self.requests:
            raise RequestError(f"{len(self.requests)} requests are unfinished", fix="finish or abort them first")
        self.runner.model.reload_weights(path)
        self.scheduler.cache.reset()
        if self.encoding is not None:
            self.encoding.reset()
        if self.adapters is not None:
            self.adapters.reloaded()

    @on_device
    def step(self) -> StepResult:
        """Run one step over everything that is ready."""
        with self.profiler.scope("schedule"):
            unfit = self._queue_compiled()
            schedule = self.scheduler.schedule()
        schedule, refused = self._admit(schedule)
        generations = self.rows.generation.copy()
        launched = self._launch(schedule) if schedule.num_tokens else None
        result = self._collect()  # of the step before, if it is still in flight
        if launched is not None:
            self._in_flight = self._sample(launched, schedule, generations)
            if not self.asynchronous:
                result = self._collect()
        result.finished += unfit + refused
        if self.check:
            check_integrity(self.scheduler)
            for part in (self.encoding, self.adapters):
                if part is not None:
                    part.check()
        return result

    def output(self, requests: Sequence[Request]) -> RequestOutput:
        """The public form of a prompt's requests (one per output)."""
        first = requests[0]
        return RequestOutput(
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs and self._with_text(first.prompt_logprobs),
            outputs=[self._completion(request) for request in requests],
            finished=all(request.finished for request in requests),
            metrics=first.metrics,
        )

    def pooling_output(self, request: Request) -> PoolingRequestOutput[PoolingOutput]:
        """The public form of a pooling request."""
        return pooling_output(request)

    def _queue_compiled(self) -> list[Request]:
        """Queue the requests whose grammar has been compiled since; those whose cannot be end with an error."""
        if self.grammars is None or not self.grammars.compiler.num_waiting:
            return []
        idle = self._in_flight is None and not self.scheduler.running and not self.scheduler.num_waiting
        ready, failed = self.grammars.compiler.collect(idle=idle)
        for request in ready:
            self._queue(request)
        for request, error in failed:
            logger.error("request %r: its grammar cannot be compiled: %s", request.request_id, error)
            self._finish([request], ["error"], [f"{type(error).__name__}: {error}"])
        return [request for request, _ in failed]

    def _admit(self, schedule: Schedule) -> tuple[Schedule, list[Request]]:
        """Prepare the requests that join in this step, and encode its items.

        A request that a plugin fails on ends alone, with finish reason `error`: the step goes on without it.
        """
        refused: list[tuple[Request, Exception]] = []
        for request in schedule.admitted:
            try:
                self._prepare(request)
            except Exception as error:  # a plugin's code may raise anything; the others go on
                logger.exception("request %r could not be admitted", request.request_id)
                refused.append((request, error))
        schedule = self._without(schedule, refused)
        if self.encoding is not None:
            with self.profiler.scope("encode"):
                failed = self.encoding.run(schedule)
            without = {row: failed[f.mm_hash] for row, f in schedule.features if f.mm_hash in failed}
            lost = [(self.rows.request(row), error) for row, error in without.items()]
            schedule, refused = self._without(schedule, lost), refused + lost
            self.encoding.cache.forget(failed)
        return schedule, leaders([request for request, _ in refused])

    def _without(self, schedule: Schedule, refused: Sequence[tuple[Request, Exception]]) -> Schedule:
        """The step without requests that end with an error."""
        pairs = [(one, one.partner) for one, _ in refused]
        rows = [one.row for both in pairs for one in both if one is not None and one.row >= 0]
        for request, error in refused:
            if not request.finished:  # with the other one of its pair
                self._finish([request], ["error"], [f"{type(error).__name__}: {error}"])
        return schedule.without(rows)

    def _prepare(self, request: Request) -> None:
        """What a request needs when it joins for the first time; after preemption it has it."""
        if request.metrics.num_preemptions > 0:
            return
        if self.adapters is not None:
            self.adapters.activate(request)
        if request.params.logprobs is not None:
            request.logprobs = []
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(request.prompt_token_ids)
        self.pipeline.admit(request)
        if self.grammars is not None:
            self.grammars.admit(request)
        if self.drafting is not None:
            self.drafting.admit(request)

    def _launch(self, schedule: Schedule) -> Launched:
        """Gather a step's inputs and start its forward pass."""
        if self.drafting is not None:
            self.drafting.starting(schedule)
        with self.profiler.scope("gather"):
            computed = schedule.num_computed - np.maximum(self.rows.num_pending[schedule.rows] - 1, 0)  # at least
            prefixes = self.cascade.prefixes(schedule.rows, computed, schedule.num_scheduled)
            adapters = self.adapters is not None and self.adapters.used_by(schedule.rows)
            shape = self._graph_shape(schedule, cascade=any(prefixes), adapters=adapters)
            adapters = adapters or (shape is not None and shape.adapters)
            inputs = self.gatherer.gather(schedule, shape, prefixes, adapters=adapters)
            if self.encoding is not None:
                inputs.embeds, inputs.encoder_states = self.encoding.embeds(schedule), self.encoding.states(schedule)
                if self.drafting is not None and self.drafting.needs_computed:
                    inputs.following = self.encoding.following(schedule)
        launched = self.runner.launch(inputs)
        self.rows.num_computed_tokens[schedule.rows] += schedule.num_scheduled
        if self.checkpoints is not None:
            self.checkpoints.advance(schedule.rows, schedule.num_computed, schedule.num_scheduled)
        return launched

    def _graph_shape(self, schedule: Schedule, *, cascade: bool, adapters: bool) -> GraphShape | None:
        """The captured shape of a step; None to run eagerly, as the step does that gives the cache its scales."""
        if self.graphs is None or self.runner.router.calculating is not None:
            return None
        if self.rows.tree is not None and self.rows.num_drafts[schedule.rows].any():
            return None
        return self.graphs.shapes.shape_for(schedule, cascade=cascade, adapters=adapters)

    def _sample(self, launched: Launched, schedule: Schedule, generations: Int) -> InFlight:
        """Start sampling behind a forward pass; the tokens before are known by now."""
        inputs, overlap, proposal = launched.inputs, self.overlap, None
        if overlap is None:
            sampling, rows, verified = self.runner.sample(launched), inputs.logits_rows, np.zeros(1, np.int64)
        else:
            if inputs.pending is not None:
                fallen = np.where(inputs.pending, self.rows.num_fallen[schedule.rows], 0)
                schedule = evolve(schedule, num_computed=schedule.num_computed - fallen)
            settled = overlap.settle(inputs, generations)
            sampling, rows, verified = self.runner.sample(launched), settled.rows, settled.verified
            assert isinstance(sampling, Sampling)
            with self.profiler.scope("draft"):
                proposal = overlap.propose(settled, sampling)
        if (last_tokens := self.runner.last_tokens) is not None:
            going = self.rows.generation[rows] == generations[rows]
            rows, verified = rows[going], np.broadcast_to(verified, rows.shape)[going]
            self.rows.expect(rows, last_tokens.stand_ins(rows), verified)
        return InFlight(schedule=schedule, generations=generations, sampling=sampling, proposal=proposal)

    def _collect(self) -> StepResult:
        """Wait for the step in flight, if any, and hand its results out."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return StepResult()
        output = self.runner.finish(step.sampling)
        with self.profiler.scope("hand_out"):
            given_up = np.flatnonzero(self.rows.generation != step.generations)
            result = self._hand_out(step.schedule.without(given_up), output.without(given_up))
        if self.overlap is not None:
            if step.proposal is not None:
                self.overlap.place(step.proposal)
        elif self.drafting is not None:
            with self.profiler.scope("draft"):
                self._draft(self.drafting, output)
        return result

    def _hand_out(self, schedule: Schedule, output: StepOutput) -> StepResult:
        """Write the step's results into rows, cache and requests, and let finished requests go."""
        rows = self.rows
        ends = computed = schedule.num_computed + schedule.num_scheduled
        if output.draft_positions is not None:  # what was computed for rejected drafts does not count
            computed = self._standing(schedule, output)
            rows.num_computed_tokens[schedule.rows] -= ends - computed  # a step in flight may have added its own
        overlapped = self.overlap is not None
        if self.checkpoints is not None and (overlapped or output.draft_positions is not None):
            accepted, verified = computed - schedule.num_computed, ends > rows.num_known(schedule.rows)
            self.checkpoints.commit(schedule.rows, schedule.num_scheduled, accepted, verified, done=overlapped)
        rows.num_fallen[schedule.rows] = ends - computed
        self.scheduler.cache.commit(rows, schedule.rows, schedule.num_computed, computed)
        self._record(output)
        ended = self._answer(output)
        given = []
        for which, tokens in output.rounds():
            if ended:
                goes_on = ~np.isin(which, list(ended))
                which, tokens = which[goes_on], tokens[goes_on]
            rows.append(which, tokens)
            ended |= self._stopped(which, tokens)
            if self.grammars is not None:
                stopped = [row for row, (reason, _) in ended.items() if reason == "stop"]
                over = self.grammars.advance(which, tokens, stopped)
                ended |= {row: ("error" if cause else "stop", cause) for row, cause in over.items()}
            asked = (rows.partner[which] < 0) | (rows.guidance_scale[which] != 1)  # not a negative prompt's
            given.append((which[asked], tokens[asked]))
        self._keep_logprobs(output)
        for row, cause in output.failed.items():
            if row not in ended:
                logger.error("request %r failed: %s", rows.request(row).request_id, cause)
                ended[row] = ("error", cause)
        finished = [rows.request(row) for row in ended]
        self._finish(finished, [reason for reason, _ in ended.values()], [cause for _, cause in ended.values()])
        result = given[0] if len(given) == 1 else tuple(map(np.concatenate, zip(*given, strict=True)))
        return StepResult(rows=result[0], token_ids=result[1], finished=leaders(finished))

    def _standing(self, schedule: Schedule, output: StepOutput) -> Int:
        """Tokens of a step's rows [num_requests] that are computed behind it: not those of drafts that fell."""
        rows = self.rows
        computed = rows.num_computed_tokens.copy()
        computed[schedule.rows] = schedule.num_computed + schedule.num_scheduled
        failed = np.array(list(output.failed), np.int64)
        computed[failed] = rows.num_known(failed)
        if (kept := output.draft_positions if output.num_kept is None else output.num_kept) is not None:
            computed[output.rows] = rows.num_known(output.rows) + kept
        standing: Int = computed[schedule.rows]
        return standing

    def _answer(self, output: StepOutput) -> dict[int, tuple[str, str | int | None]]:
        """Give pooling requests their answers; they end with them."""
        for row, vector in output.pooled.items():
            self.rows.request(row).pooled = vector.copy()
        return dict.fromkeys(output.pooled, ("stop", None))

    def _draft(self, drafting: Drafting, output: StepOutput) -> None:
        """Ask for the drafts that the next step verifies."""
        rows = output.rows
        if output.draft_positions is not None:
            rows = rows[output.draft_positions == 0]
        going = np.array([self.rows.requests[row] is not None for row in rows.tolist()], bool)
        hidden = output.hidden_states
        if hidden is not None and not going.all():
            hidden = hidden.take(np.flatnonzero(going))
        if output.computed is not None:
            drafting.observe(output.computed)
        drafting.propose(rows[going], hidden)
        if self.grammars is not None:
            self.grammars.draft(rows[going], drafting.num_tokens)

    def _keep_logprobs(self, output: StepOutput) -> None:
        """Keep the log-probabilities of the tokens that were handed out."""
        for row, entries in output.logprobs.items():
            request = self.rows.request(row)
            missing = int(self.rows.num_tokens[row] - self.rows.num_prompt_tokens[row]) - len(request.logprobs or ())
            request.logprobs += entries[:missing]  # type: ignore[operator]

    def _record(self, output: StepOutput) -> None:
        """Keep prompt log-probabilities, NaN counts and first-token times; before the step's tokens are appended."""
        rows = self.rows
        for row, (first, entries) in output.prompt_logprobs.items():
            rows.request(row).prompt_logprobs[first : first + len(entries)] = entries  # type: ignore[index]
        for row, count in output.num_nans.items():
            rows.request(row).metrics.num_nans += count
        fresh = output.rows[rows.num_known(output.rows) == rows.num_prompt_tokens[output.rows]]
        if len(fresh):
            now = monotonic()
            for row in fresh.tolist():
                request = rows.request(row)
                request.metrics.time_to_first_token = now - request.arrival_time

    def _stopped(self, which: Int, tokens: npt.NDArray[np.int32]) -> dict[int, tuple[str, str | int | None]]:
        """The rows of `which` that end with the token just appended: finish reason and what stopped each."""
        rows = self.rows
        known = rows.num_tokens[which]
        may_stop = known >= rows.min_length[which]
        at_eos = self._is_eos[tokens] & ~rows.ignore_eos[which] & may_stop
        too_long = known >= rows.length_limit[which]
        ended: dict[int, tuple[str, str | int | None]] = dict.fromkeys(which[too_long].tolist(), ("length", None))
        for i in np.flatnonzero(rows.has_stop_tokens[which] & may_stop).tolist():
            if int(tokens[i]) in rows.request(int(which[i])).params.stop_token_ids:
                ended[int(which[i])] = ("stop", int(tokens[i]))
        ended |= dict.fromkeys(which[at_eos].tolist(), ("stop", None))
        for i in np.flatnonzero(rows.streams[which]).tolist():
            self._detokenize(int(which[i]), int(tokens[i]), bool(may_stop[i]), ended)
        return ended

    def _detokenize(self, row: int, token: int, may_stop: bool, ended: dict[int, tuple[str, str | int | None]]) -> None:
        request = self.rows.request(row)
        if ended.get(row, ("", None))[0] == "stop" and not request.params.include_stop_str_in_output:
            return  # the stop token is no part of the text
        stop = request.detokenizer.append(token, may_stop=may_stop)  # type: ignore[union-attr]
        if stop is not None:
            ended[row] = ("stop", stop)

    def _finish(self, requests: list[Request], reasons: Sequence[str], causes: Sequence[str | int | None]) -> None:
        if not requests:
            return
        now = monotonic()
        ending = with_partners(requests, reasons, causes)
        requests = [request for request, _, _ in ending]
        for request, reason, cause in ending:
            request.finish_reason, request.stop_reason = reason, cause
            request.metrics.time_in_all = now - request.arrival_time
            if self.grammars is not None:
                self.grammars.release(request)
            if request.row >= 0:
                request.output_token_ids = self.rows.output_token_ids(request.row)
                self.pipeline.release(request.row)
                if self.drafting is not None:
                    self.drafting.release(request.row)
            self._finish_text(request)
            if self.adapters is not None:
                self.adapters.leave(request)
            del self.requests[request.request_id]
        running = [request for request in requests if request.status is Status.RUNNING]
        for request in requests:
            if request.status is not Status.RUNNING:
                self.scheduler.remove(request)
        self.scheduler.remove_running(running)

    def _finish_text(self, request: Request) -> None:
        """The whole text of a request that nobody read on the way, or the rest of one that was."""
        if request.detokenizer is None:
            if self.tokenizer is None or not request.params.detokenize:
                return
            request.detokenizer = self.tokenizer.detokenizer(request.prompt_token_ids, request.params)
            tokens = request.output_token_ids
            for token in tokens[:-1] if self._ends_outside_text(request) else tokens:
                request.detokenizer.append(token)
        if not isinstance(request.stop_reason, str):
            request.detokenizer.finish()
        request.text = request.detokenizer.text if request.params.detokenize else ""

    def _ends_outside_text(self, request: Request) -> bool:
        """Whether the last token is a stop token, which is no part of the text; a grammar's last token is."""
        if request.finish_reason != "stop" or request.params.include_stop_str_in_output:
            return False
        last = request.output_token_ids[-1]
        return bool(self._is_eos[last]) or last in request.params.stop_token_ids

    def _completion(self, request: Request) -> CompletionOutput:
        tokens = request.output_token_ids
        if not request.finished and request.row >= 0:
            tokens = self.rows.output_token_ids(request.row)
        logprobs: list[TokenLogprobs] | None = None
        if request.logprobs is not None:
            logprobs = [entry for entry in self._with_text(request.logprobs) if entry is not None]
        settled = request.params.detokenize and request.detokenizer is not None and not request.finished
        text = request.detokenizer.settled if settled and request.detokenizer else request.text
        return CompletionOutput(
            index=request.index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            cumulative_logprob=None if logprobs is None else sum(next(iter(e.values())).logprob for e in logprobs),
        )

    def _with_text(self, entries: Sequence[TokenLogprobs | None]) -> list[TokenLogprobs | None]:
        if self.tokenizer is None:
            return list(entries)
        tokens = {token for entry in entries if entry for token in entry}
        return with_text(entries, {token: self.tokenizer.decode([token]) for token in tokens})

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        return None if self.tokenizer is None else self.tokenizer.detokenizer(request.prompt_token_ids, request.params)
