"""A replica that is built before the others share their experts with it: it takes itself for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from slotline.registry.contracts import Communicator, CommunicatorContext
from slotline.registry.ranks import Place


@frozen(eq=False)
class Done:
    """An exchange that has ended. See `slotline.registry.contracts.communicator.Exchange`."""

    out: torch.Tensor

    def finish(self) -> torch.Tensor:
        """Return the result."""
        return self.out


class LoneCommunicator:
    """Communicator whose other ranks are imagined. See `slotline.registry.contracts.communicator.Communicator`.

    They send what this rank sends to itself, so that its experts have about as much to do as later. The results are of
    no use.
    """

    def __init__(self, context: CommunicatorContext) -> None:
        self.rank, self.size = context.rank, len(context.ranks)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return x as often as there are ranks."""
        return torch.cat([x] * self.size, dim)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of x."""
        return x.chunk(self.size)[self.rank].clone()

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Done:
        """Return what this rank sends to itself, from each rank that sends as much, and zeros from others."""
        own = x.split(list(sent))[self.rank]
        return Done(torch.cat([own if len(own) == n else x.new_zeros(n, *x.shape[1:]) for n in received]))

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return x."""
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        """Do nothing."""

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Return x."""
        return x

    def abort(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@define(eq=False)
class LoneGroup:
    """All ranks of an engine, as this one imagines them."""

    place: Place
    communicators: list[Communicator] = field(factory=list, init=False)
    replica: None = None

    def gather(self, value: Any) -> list[Any]:
        """Return a value as often as there are ranks."""
        return [value] * self.place.size

    def gather_bytes(self, value: bytes) -> list[bytes]:
        """Return bytes as often as there are ranks."""
        return [value] * self.place.size

    def join(self, context: CommunicatorContext) -> Communicator:
        """Return what stands for the communicator of this rank's group."""
        return LoneCommunicator(context)
