"""The engine of one rank. What rank 0 is asked to do is told to the other ranks, which do the same."""

from __future__ import annotations

import hashlib
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from attrs import define, field

from slotline.core.batch.request import Request
from slotline.core.engine.engine import Engine
from slotline.core.engine.engine_lock import exclusive
from slotline.core.engine.output_processor import StepResult
from slotline.ranks.group import RankGroup
from slotline.ranks.links import Link, Links
from slotline.registry.errors import IntegrityError, RankError, RequestError
from slotline.registry.loading import one_line

STEP = pickle.dumps([])
"""The message of a step before which nothing arrived."""
_TABLES = ("num_tokens", "num_computed_tokens", "generation")


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
        log: pickled calls that the other ranks have not been told. None if they are made on all ranks alike.
    """

    group: RankGroup | None = field(default=None, init=False)
    links: Links | None = field(default=None, init=False)
    link: Link | None = field(default=None, init=False)
    log: list[bytes] | None = field(default=None, init=False)
    _failed: RankError | None = field(default=None, init=False)

    def connect(self, group: RankGroup, links: Links | None, link: Link | None, *, logged: bool) -> None:
        """Run in step with the other ranks from now on.

        Args:
            logged: whether rank 0 tells the other ranks what it is asked to do.
        """
        self.group, self.links, self.link = group, links, link
        self.log = [] if logged and links is not None else None

    @exclusive
    def add(self, /, request_id: str, prompt_token_ids: Sequence[int], params: Any, **options: Any) -> Request:
        """See `Engine.add`.

        Raises:
            RequestError: also if the request cannot be sent to other processes.
            RankError: if a rank has failed.
        """
        self._refuse_failed()
        entry = self._entry("add", request_id, prompt_token_ids, params, **options)
        request = super().add(request_id, prompt_token_ids, params, **options)
        self._note(entry)
        return request

    @exclusive
    def abort(self, request_id: str) -> Request | None:
        """See `Engine.abort`."""
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
        self._note(self._entry("reload_weights", path))
        self._send(pickle.dumps([*(self.log or ()), b""]))
        with self._in_step():
            super().reload_weights(path)

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
        self._send(STEP if not self.log else pickle.dumps(self.log))
        with self._in_step():
            result = super().step()
            if self.check:
                self._compare_rows()
        return result

    def end_collectives(self) -> None:
        """End the collectives that wait for a rank that is gone. Called by another thread."""
        for communicator in () if self.group is None else self.group.communicators:
            communicator.abort()

    def perform(self, message: bytes) -> None:
        """Do what rank 0 was asked to do before its next step, and the step itself."""
        entries = pickle.loads(message)
        for entry in entries:
            if not entry:
                return  # the last call was no step
            name, given, options = pickle.loads(entry)
            try:
                getattr(self, name)(*given, **options)
            except RequestError:
                if name != "reload_weights":
                    raise
        self.step()

    def _entry(self, name: str, *given: Any, **options: Any) -> bytes:
        if self.log is None:
            return b""
        try:
            return pickle.dumps((name, given, options))
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
        if self._failed is not None:
            raise self._failed
        if self.links is not None and self.links.failed.is_set():
            self._failed = self.links.error()
            raise self._failed

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Have the ranks know of a step. An error that not all ranks raise ends them."""
        if self.links is None:
            with self._follow():
                yield
            return
        links = self.links
        links.begin_step()
        try:
            with interrupts_later():
                yield
            links.end_step()
        except BaseException as error:
            if not links.failed.is_set() and links.all_raised(links.step):
                links.end_step()
                raise
            self._failed = links.error()
            raise self._failed from error

    @contextmanager
    def _follow(self) -> Iterator[None]:
        link = self.link
        assert link is not None
        link.step += 1
        try:
            with interrupts_later():
                yield
        except BaseException as error:
            link.raised(error)
            if link.failure:
                raise RankError(link.failure, fix="start all ranks again") from error
            raise

    def _compare_rows(self) -> None:
        """Compare the rows of all ranks, for the integrity checker.

        Raises:
            IntegrityError: naming the ranks that differ from rank 0.
        """
        assert self.group is not None
        digest = hashlib.sha256()
        for name in _TABLES:
            digest.update(np.ascontiguousarray(getattr(self.rows, name)).tobytes())
        first, *others = self.group.gather(digest.hexdigest())
        if wrong := [rank for rank, other in enumerate(others, 1) if other != first]:
            raise IntegrityError(
                f"the rows of ranks {wrong} differ from those of rank 0",
                fix="report it with the configuration: ranks must schedule and draw alike",
            )


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
    signal.signal(signal.SIGINT, lambda number, frame: kept.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if kept and callable(before):
        before(*kept[0])
