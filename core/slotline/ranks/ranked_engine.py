"""The engine of one rank. What rank 0 is asked to do is told to the other ranks, which do the same."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from attrs import define, field

from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import ForwardOutput
from slotline.core.engine.engine import Engine
from slotline.core.engine.engine_lock import exclusive
from slotline.core.engine.output_processor import StepResult
from slotline.ranks.expert_balance import COUNT, NOT_COUNTED, BalanceReport, ExpertBalance
from slotline.ranks.group import RankGroup, waits_in
from slotline.ranks.links import Link, Links
from slotline.ranks.messages import pickled
from slotline.ranks.rows import difference, digest_of, tables_of
from slotline.ranks.stacks import lost_others
from slotline.ranks.watch import GRACE
from slotline.registry.errors import RankError, RequestError, SlotlineError
from slotline.registry.loading import one_line

_STEPS = ("reload_weights", "rebalance_experts", "run_experts")
"""Calls of the log that are steps of their own. Rank 0 is told of their errors."""
STEP = pickle.dumps([])
"""The message of a step before which nothing arrived."""


@define(kw_only=True, eq=False, slots=False)
class RankedEngine(Engine):
    """Engine that runs in step with those of other ranks.

    Every rank schedules the same requests and draws the same tokens, since logits are joined and draws depend on seed
    and position alone. So only arrivals are told: each method that changes an engine is noted in a log, which is sent
    before the next step.

    Attributes:
        group: all ranks. None until `connect`.
        links: rank 0's connections, None on other ranks.
        link: another rank's connection, None on rank 0.
        balance: places experts. None without counted experts.
        log: pickled calls that the other ranks have not been told. None if they are made on all ranks alike.
        end: ends the other ranks. It may be called again.
    """

    group: RankGroup | None = field(default=None, init=False)
    links: Links | None = field(default=None, init=False)
    link: Link | None = field(default=None, init=False)
    balance: ExpertBalance | None = field(default=None, init=False)
    log: list[bytes] | None = field(default=None, init=False)
    end: Callable[[], Any] = field(default=lambda: None, init=False)
    _told: bool = field(default=False, init=False)
    _failed: SlotlineError | None = field(default=None, init=False)
    _deferred: dict[str, Request] = field(factory=dict, init=False)
    _collected: dict[str, tuple[Request, BaseException | None]] = field(factory=dict, init=False)

    def connect(self, group: RankGroup, links: Links | None, link: Link | None, *, logged: bool) -> None:
        """Run in step with the other ranks from now on.

        Args:
            logged: whether rank 0 tells the other ranks what it is asked to do.
        """
        self._told = logged and link is not None
        self.group, self.links, self.link = group, links, link
        for known in (None if links is None else links.watch, link):
            if known is not None:
                known.group, known.building = group, False
        self.log = [] if logged and links is not None else None

    @property
    def failure(self) -> SlotlineError | None:
        """Return what ended this engine, the failure of a rank or `close`. None while it takes requests."""
        if self._failed is None and self.links is not None and self.links.failed.is_set():
            self._failed = self.links.error()
        if self._failed is None and self.link is not None and self.link.failure:
            self._failed = RankError(self.link.failure, fix="start all ranks again")
        return self._failed

    @exclusive
    def add(self, /, request_id: str, prompt_token_ids: Sequence[int], params: Any, **options: Any) -> Request:
        """See `Engine.add`.

        Raises:
            RequestError: also if the request cannot be sent to other processes.
            RankError: if a rank has failed.
        """
        self._refuse_failed()
        entry = self._entry("add", request_id, prompt_token_ids, params, **options)
        with interrupts_later():
            request = super().add(request_id, prompt_token_ids, params, **options)
            self._note(entry)
            if self._is_deferred(request):
                self._deferred[request_id] = request
        return request

    @exclusive
    def abort(self, request_id: str) -> Request | None:
        """See `Engine.abort`."""
        with interrupts_later():
            request = super().abort(request_id)
            if request is not None:
                self._note(self._entry("abort", request_id))
        return request

    @exclusive
    def reload_weights(self, path: Path | None = None) -> None:
        """See `Engine.reload_weights`."""
        self._refuse_failed()
        if self.requests:
            super().reload_weights(path)  # which refuses
        with self.told_step("reload_weights", path):
            super().reload_weights(path)

    @contextmanager
    def told_step(self, call: str, *given: Any) -> Iterator[None]:
        """Enter a step that is a call of a method of this engine, which the other ranks make too.

        Raises:
            RankError: if a rank has failed.
        """
        self._refuse_failed()
        self._note(self._entry(call, *given))
        with interrupts_later(), self._in_step():
            self._send(pickle.dumps([*(self.log or ()), b""]))
            yield

    @exclusive
    def forget_prefixes(self) -> None:
        """See `Engine.forget_prefixes`."""
        super().forget_prefixes()
        self._note(self._entry("forget_prefixes"))

    @exclusive
    def everywhere(self, call: str, /, *given: Any) -> Any:
        """See `Engine.everywhere`."""
        self._refuse_failed()
        entry = self._entry("everywhere", call, *given)
        result = super().everywhere(call, *given)
        self._note(entry)
        return result

    @exclusive
    def step(self) -> StepResult:
        """See `Engine.step`.

        Raises:
            RankError: if a rank died, hangs, or raised an error that this one did not.
        """
        self._refuse_failed()
        self._refuse_within()
        with interrupts_later():
            if self._deferred and not self._told:
                self._agree_on_ready()
            if self.extensions.measured and not self._told:
                self._learn_alike()
            with self._in_step():
                self._send(STEP if not self.log else pickle.dumps(self.log))
                result = super().step()
                if self.balance is not None:
                    self.balance.after_step()
                return result

    @exclusive
    def rebalance_experts(self) -> BalanceReport:
        """Place the experts of all ranks by the tokens that they had. Requests may be unfinished.

        Raises:
            RequestError: if the tokens of experts are not counted.
            RankError: if a rank has failed.
        """
        self._refuse_failed()
        balance = self.balance
        if balance is None:
            raise RequestError(NOT_COUNTED, fix=COUNT)
        with self.told_step("rebalance_experts"):
            return balance.rebalance()

    @exclusive
    def queue_deferred(self, told: Sequence[tuple[str, bool]]) -> None:
        """Queue deferred requests that rank 0 has queued, once they are ready here.

        Args:
            told: their ids, and whether each has failed on rank 0.

        Raises:
            RankError: if one fails here and not on rank 0, or the other way round.
        """
        while any(one in self._deferred and one not in self._collected for one, _ in told):
            self._collect_deferred(idle=True)
        ended = [(*self._collected.pop(one), failed) for one, failed in told if one in self._collected]
        for request, error, failed in ended:
            self._deferred.pop(request.request_id, None)
            if (error is not None) != failed:
                why = "failed on rank 0 and not here"
                if error is not None:
                    why = f"did not fail on rank 0 but here: {one_line(error)}"
                raise RankError(
                    f"request {request.request_id!r} {why}", fix="give all ranks the same packages and files"
                )
        self.intake.queue_ready([request for request, error, _ in ended if error is None])
        failures = [(request, error) for request, error, _ in ended if error is not None]
        self.endings.fail(failures)
        self._ended += [request for request, _ in failures]

    def settle(self) -> None:
        """See `Engine.settle`. All ranks wait for what they deferred, so that they queue the same requests."""
        while any(one in self.requests and one not in self._collected for one in self._deferred):
            self._collect_deferred(idle=True)
        super().settle()
        self._collected.clear()
        self._deferred = {name: one for name, one in self.requests.items() if self._is_deferred(one)}

    def close(self) -> None:
        """End the other ranks. This engine takes no more requests then. It may be called again."""
        self._failed = self.failure or RequestError("the engine was closed", fix="build another one")
        self.end()

    def follow(self) -> None:
        """Do what rank 0 is asked to do, until it ends.

        Raises:
            SlotlineError: if this rank cannot do it.
        """
        assert self.link is not None
        while True:
            try:
                message = self.link.log.recv_bytes()
            except (EOFError, OSError):
                return
            self.perform(message)

    def perform(self, message: bytes) -> None:
        """Do what rank 0 was asked to do before its next step, and the step itself.

        Rank 0 is told of an error in a step, and goes on if it raised it too.

        Raises:
            SlotlineError: if this rank cannot do what rank 0 did before the step.
        """
        for entry in pickle.loads(message):
            if not entry:
                return  # the last call was no step
            name, given, options = pickle.loads(entry)
            if name in _STEPS:
                with suppress(Exception):
                    getattr(self, name)(*given, **options)
            else:
                getattr(self, name)(*given, **options)
        with suppress(Exception):  # told to rank 0
            self.step()

    def _queue_ready(self) -> list[Request]:
        return []  # done before the step

    def _is_deferred(self, request: Request) -> bool:
        return any(defer(request) for defer in self.extensions.defer)

    def _agree_on_ready(self) -> None:
        """Queue the deferred requests that are ready on rank 0, on all ranks."""
        assert self.group is not None
        self._deferred = {name: one for name, one in self._deferred.items() if self.requests.get(name) is one}
        names: list[tuple[str, bool]] = []
        if self.link is None:
            idle = not self._in_flight and not self.scheduler.running and not self.scheduler.num_waiting
            self._collect_deferred(idle=idle)
            names = [(one, error is not None) for one, (_, error) in self._collected.items()]
            self._note(self._entry("queue_deferred", names))
        if self.log is None:
            names = self.group.gather(names)[0]
        self.queue_deferred(names)

    def _learn_alike(self) -> None:
        """Have the extensions of all ranks learn what those of rank 0 have measured."""
        found: list[tuple[str, Any]] = []
        if self.link is None:
            found = [(name, what) for name, measured in self.extensions.measured if (what := measured())]
        if self.log is None:
            assert self.group is not None
            found = self.group.gather(found)[0]
        for name, what in found:
            self.everywhere(f"{name}.learn", what)

    def _collect_deferred(self, *, idle: bool) -> None:
        for collect in self.extensions.collect_ready:
            ready, failed = collect(idle=idle, gives_way=lambda: bool(self.lock.line))
            found = [*((one, None) for one in ready), *failed]
            self._collected.update((one.request_id, (one, error)) for one, error in found)
        self._collected = {name: one for name, one in self._collected.items() if self.requests.get(name) is one[0]}

    def _entry(self, name: str, *given: Any, **options: Any) -> bytes:
        if self.log is None:
            return b""
        try:
            return pickled((name, given, options))
        except Exception as error:
            raise RequestError(
                f"this request cannot be sent to the other ranks: {one_line(error)}",
                fix="give logits processors by name, and functions that are defined in a module",
            ) from error

    def _note(self, entry: bytes) -> None:
        if self.log is not None:
            self.log.append(entry)

    def _send(self, message: bytes) -> None:
        if self.log is not None and self.links is not None:
            self.links.send(message)
            self.log.clear()

    def _refuse_failed(self) -> None:
        if (failure := self.failure) is not None:
            self.end()
            raise failure

    def _refuse_within(self) -> None:
        if (self.links is not None and self.links.watch.within) or (self.link is not None and self.link.within):
            raise RequestError(
                "a step inside another step of several ranks", fix="step from a function on logits only with one rank"
            )

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Have the ranks know of a step. An error that not all ranks raise ends them."""
        if self.links is None:
            with self._follow():
                yield
            return
        links, watch = self.links, self.links.watch
        watch.begin_step()
        try:
            yield
        except BaseException as error:
            if not lost_others(error, waits_in(self.group)) and watch.all_raised():
                raise
            watch.fail(error)
            self._failed = links.error()
            self.end()
            raise self._failed from error
        finally:
            watch.end_step()

    @contextmanager
    def _follow(self) -> Iterator[None]:
        link = self.link
        assert link is not None
        link.begin_step()
        try:
            yield
        except BaseException as error:
            link.raised(error)
            if lost_others(error, waits_in(self.group)) and (failure := link.failure_within(GRACE)):
                raise RankError(failure, fix="start all ranks again") from error
            raise
        finally:
            link.within = False

    def _launch(self, schedule: SchedulerOutput) -> ForwardOutput:
        if self.check:  # before collectives whose sizes would differ
            self._compare(schedule)
        return super()._launch(schedule)

    def _check(self) -> None:
        super()._check()
        self._compare()

    def _compare(self, schedule: SchedulerOutput | None = None) -> None:
        """Compare the rows of all ranks, and what they have scheduled, for the integrity checker.

        Raises:
            RankError: naming the first rank that differs from rank 0, and where.
        """
        assert self.group is not None
        first, *others = self.group.gather(digest_of(self.rows, schedule))
        wrong = next((rank for rank, other in enumerate(others, 1) if other != first), None)
        if wrong is None:
            return
        tables = self.group.gather(tables_of(self.rows, schedule))
        where = difference(tables[0], tables[wrong], wrong)
        if self.links is not None:
            self.links.watch.disagrees(wrong, where)
            raise self.links.error()
        raise RankError(f"rank {wrong} disagrees with rank 0: {where}", rank=wrong)


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Keep Ctrl-C until the block ends, since the ranks are in a step together."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):
        yield
        return
    kept: list[tuple[int, FrameType | None]] = []

    def keep(number: int, frame: FrameType | None) -> None:
        kept.append((number, frame))
        if len(kept) > 1 and callable(before):
            before(number, frame)  # who asks twice does not want to wait

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if kept and callable(before):
        before(*kept[0])
