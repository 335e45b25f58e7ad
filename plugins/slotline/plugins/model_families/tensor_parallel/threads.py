"""Ranks as threads of one process, for checks of small models.

One thread runs at a time: it goes on until it waits in a collective for the others. So code that is not made for
threads may run in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from attrs import define, field

from slotline.registry.contracts.communicator import Communicator, Exchange
from slotline.registry.contracts.model_family import Shard

T = TypeVar("T")


class _OtherError(RuntimeError):
    """Another rank failed."""


@define(eq=False)
class _Meeting:
    """Tensors of the ranks in the current collective."""

    size: int
    turn: threading.Condition = field(factory=threading.Condition)
    given: dict[int, torch.Tensor] = field(factory=dict)
    taken: list[torch.Tensor] = field(factory=list)
    number: int = 0
    failed: bool = False

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in their order."""
        self.given[rank] = x
        number = self.number
        if len(self.given) == self.size:
            self.taken = [self.given[one] for one in range(self.size)]
            self.given, self.number = {}, number + 1
            self.turn.notify_all()
        while self.number == number and not self.failed:
            self.turn.wait()
        if self.failed:
            raise _OtherError("another rank failed")
        return self.taken


@define(eq=False)
class ThreadCommunicator:
    """See `slotline.registry.contracts.communicator.Communicator`."""

    rank: int
    size: int
    meeting: _Meeting
    calls: int = 0

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.calls += 1
        return self.meeting.exchange(self.rank, x.clone())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(x)).sum(0)

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(self._all(x), dim)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank].clone()

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Exchange:
        sizes = self._all(torch.tensor(sent))
        parts = [one.split(own.tolist())[self.rank] for one, own in zip(self._all(x), sizes, strict=True)]
        return _Finished(torch.cat(parts))

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._all(x)[source].clone()

    def send(self, x: torch.Tensor, to: int) -> None:
        raise NotImplementedError

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        raise NotImplementedError

    def abort(self) -> None:
        self.meeting.failed = True

    def close(self) -> None:
        """Do nothing, because nothing is held."""


@define
class _Finished:
    out: torch.Tensor

    def finish(self) -> torch.Tensor:
        """Return the result."""
        return self.out


def run(size: int, work: Callable[[Shard, Communicator], T]) -> list[T]:
    """Return what each of `size` ranks returns.

    Raises:
        Exception: what the first rank that failed raised.
    """
    meeting, results, errors = _Meeting(size), dict[int, T](), list[BaseException]()

    def one(rank: int) -> None:
        with meeting.turn:
            try:
                results[rank] = work(Shard(rank=rank, size=size), ThreadCommunicator(rank, size, meeting))
            except BaseException as error:
                if not isinstance(error, _OtherError):
                    errors.append(error)
                meeting.failed = True
                meeting.turn.notify_all()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
