"""The front of replicas: it takes requests as an engine does, and steps nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import wraps
from pathlib import Path
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast
from weakref import finalize

import numpy as np
from attrs import define, field

from slotline.core.api.outputs import RequestOutput
from slotline.core.api.prompts import as_token_array
from slotline.core.batch.request import Request
from slotline.core.engine.engine import Engine
from slotline.core.engine.engine_lock import HOLDER, EngineLock, exclusive
from slotline.core.engine.output_builder import request_output
from slotline.core.engine.output_processor import StepResult
from slotline.core.engine.stop_checker import StopChecker
from slotline.core.scheduler.admission import EngineLimits, check_request
from slotline.ranks.ranked_engine import interrupts_later
from slotline.ranks.replicas.front_extensions import FrontAdapters, FrontMultimodal, FrontPooling, FrontReader, results
from slotline.ranks.replicas.front_requests import NOBODY, FrontRows, SentRequest, sent_request
from slotline.ranks.replicas.growth import Growth, ScaleReport
from slotline.ranks.replicas.held_prefixes import ToldBlocks
from slotline.ranks.replicas.outboxes import Outboxes
from slotline.ranks.replicas.replica_links import ReplicaLink, ReplicaLinks
from slotline.ranks.replicas.reports import Abort, Add, Load, Report
from slotline.ranks.replicas.router import Router
from slotline.registry.attribution import BuiltPlugins
from slotline.registry.contracts import ResponseParser
from slotline.registry.errors import EngineFailedError, RequestError, SlotlineError
from slotline.registry.loading import one_line
from slotline.registry.own_process import OwnProcess
from slotline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from slotline.registry.negotiation import Plan

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="ReplicaFront")
_LOOK = 0.5  # seconds between two looks at replicas that say nothing


def turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have a method run while no other thread is in the front. One that waits for replicas makes way."""
    guarded = exclusive(method)

    @wraps(method)
    def called(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        me = get_ident()
        if self.lock.holder.get(HOLDER, me) != me:
            self.wake()
        return guarded(self, *args, **options)

    return called


@define(eq=False)
class FrontHandOut:
    """What the front has in place of an engine's output processor."""

    stops: StopChecker


@define(kw_only=True, eq=False, slots=False)
class ReplicaFront:
    """Front of an engine's replicas, each of which runs in a process of its own.

    It offers what `LLM`, `AsyncLLM` and the server use of an `Engine`. `step` waits for what replicas tell.

    Attributes:
        model_folder: the checkpoint.
        extensions: what stands for those of the engines, by name.
        requests: the unfinished, by id. Those that are being aborted have other keys.
        rows: has the requests by the numbers that stand for rows in the results of `step`.
        growth: starts further replicas.
        told: the blocks that replicas tell of, None if they are chosen by other things.
        reloads: number of times that the weights were read again.
        weights: the folder that they were read from last, None for the checkpoint.
        unsettled: always False, since no call leaves anything behind.
    """

    plan: Plan
    model_folder: Path
    links: ReplicaLinks
    router: Router
    limits: EngineLimits
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    response_parser: ResponseParser | None
    sampling_defaults: Mapping[str, Any]
    plugins: BuiltPlugins
    hand_out: FrontHandOut
    task: str
    has_adapters: bool
    has_items: bool
    growth: Growth
    told: ToldBlocks | None = None
    extensions: dict[str, Any] = field(init=False)
    requests: dict[str, Request] = field(factory=dict, init=False)
    rows: FrontRows = field(factory=FrontRows, init=False)
    lock: EngineLock = field(factory=EngineLock, init=False)
    unsettled: bool = field(default=False, init=False)
    reloads: int = field(default=0, init=False)
    weights: Path | None = field(default=None, init=False)
    _arrivals: int = field(default=0, init=False)
    _key: int = field(default=0, init=False)
    _turns: int = field(default=0, init=False)
    _looked: float = field(factory=monotonic, init=False)
    _group: tuple[str, int] = field(default=("", 0), init=False)  # id and replica of the last prompt
    _outboxes: Outboxes = field(init=False)
    _own_process: OwnProcess = field(factory=lambda: OwnProcess("the engine"), init=False)
    _close: Callable[[], object] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._outboxes = Outboxes(self.links)
        self.extensions = {}
        if self.has_adapters:
            self.extensions["adapters"] = FrontAdapters(self.links, self.rows.requests)
        if self.has_items:
            self.extensions["multimodal"] = FrontMultimodal(FrontReader(self.links))
        if self.task != "generate":
            self.extensions["pooling"] = FrontPooling(self.links)
        self._close = finalize(self, self.links.close, 2.0)

    @property
    def has_work(self) -> bool:
        """True if any request is unfinished."""
        return bool(self.requests)

    @property
    def failure(self) -> SlotlineError | None:
        """Return what ended the replicas, None while they run."""
        return self.links.error

    @property
    def loads(self) -> list[Load]:
        """Return what each replica said last of its load."""
        return [one.load for one in self.links.replicas]

    @turn
    def add(
        self: ReplicaFront,
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
        **inputs: Any,
    ) -> Request:
        """Choose a replica for a request, which is sent there by `step` or `confirm`. See `Engine.add`.

        Raises:
            RequestError: naming the error, if it can be told here. Others are told by `confirm`, or are a request's
                `refusal`.
            RankError: if a replica has failed.
        """
        self._own_process.refuse_others()
        self._refuse_failed()
        self._key += 1
        request = sent_request(
            self._key,
            request_id,
            as_token_array(prompt_token_ids),
            params,
            samples=self.task == "generate",
            tokenizer=self.tokenizer,
            prompt=prompt,
            priority=priority,
            cache_salt=cache_salt,
            index=index,
            arrival=self._arrivals,
            inputs=inputs,
        )
        check_request(request, self.limits, has_tokenizer=self.tokenizer is not None)
        if request_id in self.requests:
            raise RequestError(
                f"request id {request_id!r} is in use", fix="use another id, or wait for the first to end"
            )
        adapter = inputs.get("lora_request")
        if adapter is not None and "adapters" in self.extensions:
            self.extensions["adapters"].add(adapter)
        self._route(request, "" if adapter is None else str(adapter.lora_int_id))
        self._arrivals += 1 + (request.params.guidance_scale != 1)
        request.begin(stream=stream and self.tokenizer is not None)
        self.requests[request_id] = self.rows.requests[request.key] = request
        options = {"priority": priority, "cache_salt": cache_salt, "index": index, "stream": stream, **inputs}
        options["arrival"] = request.arrival
        self._outboxes.put(request.replica, Add(request.key, request_id, request.token_array, params, options))
        return request

    @turn
    def abort(self, request_id: str) -> Request | None:
        """End a request. Its replica tells the end in a later `step`. Return None if no such request is unfinished."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        assert isinstance(request, SentRequest)
        if self.failure is not None:
            self._forget(request)
            request.give_up("abort")
            return request
        request.aborted = True
        self.requests[f"{request_id} (aborted, {request.key})"] = request
        self._outboxes.put(request.replica, Abort(request.key))
        return request

    def confirm(self, requests: Sequence[Request]) -> BaseException | None:
        """Wait until the replicas have checked all requests. Return why the first of these was refused, if one was.

        Raises:
            RankError: if a replica has failed.
        """
        for future in self._sent():
            future.result()
        self._refuse()
        for request in requests:
            if isinstance(request, SentRequest) and request.refusal is not None:
                return request.refusal
        return None

    @turn
    def withdraw(self, requests: Sequence[Request]) -> None:
        """Have the next request arrive in place of the first that was refused, as in an engine.

        Requests that came later must be aborted. If another thread has added some, nothing changes.
        """
        first = min(one.arrival for one in requests if isinstance(one, SentRequest) and one.refusal is not None)
        if all(one.aborted for one in self.rows.requests.values() if one.arrival > first):
            self._arrivals = first

    def step(self) -> StepResult:
        """Wait for what replicas tell, and return it. It may be nothing, as when another thread wants to be in turn.

        Raises:
            SlotlineError: what a step of a replica raised, or that a replica has failed.
        """
        return self._step(self._turns)

    @exclusive
    def _step(self, seen: int) -> StepResult:
        self._own_process.refuse_others()
        if seen != self._turns or not self.requests:  # another thread's step may have ended what the caller waits for
            return StepResult()
        self._refuse_failed()
        self._outboxes.send()
        self.links.wait(_LOOK)
        with interrupts_later():
            reports = self.links.take()
            self._turns += bool(reports)
            result = self._apply(reports)
        if (now := monotonic()) - self._looked > _LOOK:
            self._looked = now
            self.links.look([number for number, load in enumerate(self.router.loads) if load])
        if not reports:
            self._refuse_failed()
        return result

    @turn
    def exclusively(self, call: Callable[P, R], /, *args: P.args, **options: P.kwargs) -> R:
        """Make a call while no other thread is in the front."""
        return call(*args, **options)

    @turn
    def everywhere(self, call: str, /, *given: Any) -> Any:
        """Call a method of what stands for an extension, as ``adapters.remove``. All replicas make the call."""
        name, _, method = call.partition(".")
        return getattr(self.extension(name), method)(*given)

    @turn
    def reload_weights(self, path: Path | None = None) -> None:
        """Have all replicas read the weights again. See `Engine.reload_weights`.

        Raises:
            RequestError: if a request is unfinished.
            ModelError: if the weights do not fit. The old weights stay.
            RankError: if only some replicas could read them, which ends all.
        """
        self._refuse_failed()
        unfinished = sum(not one.aborted for one in self.rows.requests.values())
        if unfinished:
            raise RequestError(f"{unfinished} requests are unfinished", fix="finish or abort them first")
        futures = self.links.call(_reload, path)
        failed = {number: error for number, future in enumerate(futures) if (error := future.exception()) is not None}
        self.router.forget()
        if 0 < len(failed) < len(futures):
            number, error = failed.popitem()
            what = f"it could not reload its weights, and others could: {one_line(error)}"
            self.links.fail(self.links.replicas[number], what, error)
            self._refuse_failed()
        results(futures)
        self.reloads, self.weights = self.reloads + 1, path

    def scale(self, data: int, pause: Callable[[], object]) -> ScaleReport:
        """Let so many replicas take requests, while unfinished requests go on.

        Further replicas are started, and take requests once all of them are built. Those above the number take no more,
        and end with their last request. If they share experts with the others, the call waits for that.

        Args:
            pause: is called while it waits. It returns after a short time.

        Raises:
            RequestError: if the number is no positive one.
            ConfigError: if there are too few devices.
            RankError: if a replica has failed.
            SlotlineError: what a new replica raised while it was built. The others go on as before.
        """
        self._own_process.refuse_others()
        return self.growth.scale(self, data, pause)

    def ask(self, function: Callable[..., R], *given: Any, reads: bool = False) -> list[R]:
        """Have all replicas call a function of a module with their engines, and return what they return.

        Args:
            reads: whether it only reads, and so may be called in the middle of a step.

        Raises:
            Exception: the first of what they raised.
        """
        return results(self.links.call(function, *given, reads=reads))

    def ask_first(self, function: Callable[..., R], *given: Any) -> R:
        """Have one replica call a function of a module with its engine, and return what it returns."""
        (found,) = results(self.links.call(function, *given, only=0))
        return cast(R, found)

    def output(self, requests: Sequence[Request]) -> RequestOutput:
        """Return the public form of a prompt's requests (one per output)."""
        if all(request.finished for request in requests):
            return request_output(requests, None, self.tokenizer)
        return self.exclusively(request_output, requests, None, self.tokenizer)

    def extension(self, name: str) -> Any:
        """Return what stands for the extension of a name, None if there is none."""
        return self.extensions.get(name)

    def wake(self) -> None:
        """Have a `step` that waits for replicas return."""
        self.links.wake()

    def close(self) -> None:
        """End the replicas."""
        self._close()

    def settle(self) -> None:
        """Do nothing, since no interrupted call leaves anything behind."""

    def _refuse_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _route(self, request: SentRequest, adapter: str) -> None:
        """Choose a replica. The outputs of one prompt stay together."""
        first, replica = self._group
        if request.index and request.request_id == f"{first}/{request.index}":
            self.router.assign(replica, request.weight)
        else:
            names = None if self.told is None else self.told.names(request)
            if self.told is None or names is None:
                key = f"{request.cache_salt}/{adapter}"
                replica = self.router.route(request.routed_tokens(), request.weight, key)
            else:
                replica = self.router.route_held(names, self.told.size, request.weight)
                request.routed_by = names
            self._group = request.request_id, replica
        request.replica = replica

    @turn
    def _sent(self) -> list[Future[None]]:
        """Send everything, and return futures of what is not checked yet."""
        self._refuse_failed()
        self._outboxes.send()
        return self.links.unchecked()

    @turn
    def _refuse(self) -> None:
        """End requests that a replica has refused."""
        while self.links.refused:
            key, error = self.links.refused.popleft()
            request = self.rows.requests[key]
            if request is not None:
                self._forget(request)
                request.give_up("error", error)

    def _apply(self, reports: Sequence[tuple[ReplicaLink, Report]]) -> StepResult:
        """Take what replicas told.

        Raises:
            SlotlineError: what a step raised, once everything is taken.
        """
        known, finished, others = self.rows.requests, list[Request](), 0
        raised: BaseException | None = None
        self._refuse()
        for link, report in reports:
            for key, token in zip(report.keys.tolist(), report.token_ids.tolist(), strict=True):
                if (request := known[key]) is not None:
                    request.take(token)
            for news in report.news:
                if (request := known[news.key]) is not None:
                    request.hear(news)
            for end in report.ended:
                if (request := known[end.key]) is not None:
                    self._forget(request)
                    request.end(end)
                    finished.append(request)
            others += report.others
            if report.prefixes is not None and self.told is not None:
                self.router.learn(link.number, report.prefixes)
            raised = raised or report.raised
            if isinstance(report.raised, EngineFailedError):
                self.links.fail(link, one_line(report.raised), report.raised)
                self._refuse_failed()
        if raised is not None:
            raise raised
        rows = np.concatenate([NOBODY, np.zeros(others, np.int64), *(report.keys for _, report in reports)])
        tokens = [np.zeros(others, np.int32), *(report.token_ids for _, report in reports)]
        return StepResult(rows=rows, token_ids=np.concatenate(tokens), finished=finished)

    def _forget(self, request: SentRequest) -> None:
        """Take a request out of those that are unfinished."""
        self.rows.requests.pop(request.key, None)
        self.router.ended(request.replica, request.weight, request.routed_by)
        name = f"{request.request_id} (aborted, {request.key})" if request.aborted else request.request_id
        if self.requests.get(name) is request:
            del self.requests[name]
        self._end_idle()

    def choose_among(self, data: int) -> int:
        """Let the first so many replicas take requests. Return the number of the others that have some."""
        self.router.choose_among(data)
        self._end_idle()
        return len(self.links.replicas) - data

    def _end_idle(self) -> None:
        """End the last replicas if they take no requests and have none."""
        least = self.router.chosen_among
        if len(self.links.replicas) > least and self.growth.ends_idle:
            used = 1 + max((one.replica for one in self.rows.requests.values()), default=0)
            self.end_last(max(least, used))

    def end_last(self, left: int) -> None:
        """End all replicas but the first so many. They have no requests."""
        for _ in range(len(self.links.replicas) - left):
            self.links.part()
            self.router.remove_last()
            self._group = "", 0

    def teach(self, new: Sequence[ReplicaLink], reloads: int) -> None:
        """Have new replicas read the weights and know the adapters that the others have.

        Args:
            reloads: as it was when they were started.
        """
        if self.weights is not None or self.reloads != reloads:
            results(self.links.call(_reload, self.weights, to=new))
        if "adapters" in self.extensions:
            self.extensions["adapters"].teach(new)


def _reload(engine: Engine, path: Path | None) -> None:
    engine.reload_weights(path)
