"""Communicator of ranks that are threads, whose gathering and scattering are operations that graphs can record."""

from __future__ import annotations

import thread_ranks
import torch
from thread_ranks import ThreadCommunicator

from slotline.registry.contracts import CommunicatorContext

_known: list[RecordedCommunicator] = []


class RecordedCommunicator(ThreadCommunicator):
    """See `ThreadCommunicator`."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = all_reduce(x, _known.index(self))
        return found

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        found: torch.Tensor = all_gather(x, _known.index(self), dim)
        return found

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = reduce_scatter(x, _known.index(self))
        return found


@torch.library.custom_op("slotline_tests::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, number: int) -> torch.Tensor:
    """Add the tensors of a communicator's ranks."""
    return torch.stack(_known[number].gather(x)).sum(0)


@torch.library.custom_op("slotline_tests::all_gather", mutates_args=())
def all_gather(x: torch.Tensor, number: int, dim: int) -> torch.Tensor:
    """Gather the tensors of a communicator's ranks."""
    return torch.cat(_known[number].gather(x), dim)


@torch.library.custom_op("slotline_tests::reduce_scatter", mutates_args=())
def reduce_scatter(x: torch.Tensor, number: int) -> torch.Tensor:
    """Scatter the sum of the tensors of a communicator's ranks."""
    one = _known[number]
    return torch.stack(one.gather(x)).sum(0).chunk(one.size)[one.rank].clone()


def join(context: CommunicatorContext) -> RecordedCommunicator:
    """Join the ranks of this thread's engine."""
    _known.append(RecordedCommunicator(thread_ranks._here.meetings.of(context), context.rank, context.name))
    return _known[-1]
