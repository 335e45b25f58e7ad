"""Ranks as threads of one process, for checks of small models and for tests.

One thread runs at a time: it goes on until it waits in a collective for the others. So code that is not made for
threads may run in them.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from attrs import define, field, frozen

from slotline.registry.contracts.communicator import Exchange
from slotline.registry.contracts.model_family import Shard

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that a rank waits for another."""


class OtherRankError(RuntimeError):
    """Another rank failed, or did not come."""


@define(eq=False)
class Meeting:
    """What ranks give each other. The one that holds `turn` runs.

    Attributes:
        size: number of ranks.
        failed: whether a rank has failed. No other waits then.
    """

    size: int
    turn: threading.Condition = field(factory=threading.Condition)
    failed: bool = False
    _given: dict[int, Any] = field(factory=dict)
    _taken: list[Any] = field(factory=list)
    _number: int = 0
    _mail: dict[tuple[str, int, int], deque[Any]] = field(factory=lambda: defaultdict(deque))

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order. Called by all of them.

        Raises:
            OtherRankError: if one fails.
        """
        self._given[rank] = value
        number = self._number
        if len(self._given) == self.size:
            self._taken = [self._given[one] for one in range(self.size)]
            self._given, self._number = {}, number + 1
            self.turn.notify_all()
        self._wait(lambda: self._number != number)
        return self._taken

    def send(self, what: str, rank: int, to: int, value: Any) -> None:
        """Leave a value for another rank."""
        self._mail[what, rank, to].append(value)
        self.turn.notify_all()

    def receive(self, what: str, rank: int, source: int) -> Any:
        """Return the next value that another rank has left.

        Raises:
            OtherRankError: if it fails.
        """
        there = self._mail[what, source, rank]
        self._wait(lambda: bool(there))
        return there.popleft()

    def give_up(self) -> None:
        """End the others' waiting. The caller has its turn."""
        self.failed = True
        self.turn.notify_all()

    def begin(self) -> None:
        """Forget a failure. No rank is at work."""
        self.failed = False
        self._given.clear()

    def _wait(self, done: Callable[[], bool]) -> None:
        if not self.turn.wait_for(lambda: done() or self.failed, PATIENCE) or not done():
            raise OtherRankError("another rank failed")


@define(eq=False)
class ThreadCommunicator:
    """See `slotline.registry.contracts.communicator.Communicator`.

    Attributes:
        name: of the group.
        calls: number of collectives so far.
    """

    meeting: Meeting
    rank: int
    name: str = "tensor"
    calls: int = 0

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.meeting.size

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return copies of all ranks' tensors."""
        assert x.is_contiguous()
        self.calls += 1
        return self.meeting.gather(self.rank, x.clone())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total, *others = self.gather(x)
        total = total.float() if x.is_floating_point() else total
        for part in others:  # one after the other, so that a sum does not hang on the others
            total = total + part
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(self.gather(x), dim)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank].clone()

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Exchange:
        self.calls += 1
        parts = self.meeting.gather(self.rank, x.clone().split(list(sent)))
        return Finished(torch.cat([part[self.rank] for part in parts]))

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self.gather(x)[source].clone()

    def send(self, x: torch.Tensor, to: int) -> None:
        self.meeting.send(self.name, self.rank, to, x.clone())

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        found: torch.Tensor = self.meeting.receive(self.name, self.rank, source)
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        return found

    def abort(self) -> None:
        self.meeting.failed = True

    def close(self) -> None:
        """Do nothing, because nothing is held."""


@frozen
class Finished:
    """Exchange that is finished when it starts."""

    out: torch.Tensor

    def finish(self) -> torch.Tensor:
        """Return the result."""
        return self.out


def run(
    size: int,
    work: Callable[[Shard, Any], T],
    make: Callable[[Meeting, int], ThreadCommunicator] = ThreadCommunicator,
) -> list[T]:
    """Return what each of `size` ranks returns.

    Args:
        work: called with a rank's part and its communicator.
        make: returns the communicator of a meeting and a rank.

    Raises:
        Exception: what the first rank that failed raised.
    """
    meeting, results, errors = Meeting(size), dict[int, T](), list[BaseException]()

    def one(rank: int) -> None:
        with meeting.turn:
            try:
                results[rank] = work(Shard(rank=rank, size=size), make(meeting, rank))
            except BaseException as error:
                errors.append(error)
                meeting.give_up()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=is_effect)
    return [results[rank] for rank in range(size)]


def is_effect(error: BaseException) -> bool:
    """Return True for an error that another rank's error has made."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OtherRankError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None
