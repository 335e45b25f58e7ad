"""Communicators `gloo` and `nccl`: collectives of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from attrs import define
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from slotline.registry.contracts.communicator import CommunicatorContext


def _queued(options: Any) -> Any:
    """Return options of a collective that runs on the current stream, between what was queued before and after."""
    options.asyncOp = False
    return options


def _wait(work: Any) -> None:
    """Wait for a collective. One that is queued on a stream already may have nothing to wait for."""
    if work is not None:
        work.wait()


_REDUCE = _queued(c10d.AllreduceOptions())
_GATHER = _queued(c10d.AllgatherOptions())  # type: ignore[attr-defined]
_SCATTER = _queued(c10d.ReduceScatterOptions())


@define(eq=False)
class TorchExchange:
    """Collective of torch.distributed that was started. See `slotline.registry.contracts.communicator.Exchange`."""

    out: torch.Tensor
    work: distributed.Work

    def finish(self) -> torch.Tensor:
        """Return the result."""
        self.work.wait()
        return self.out


class TorchCommunicator:
    """Group of ranks. See `slotline.registry.contracts.communicator.Communicator`."""

    def __init__(self, context: CommunicatorContext, backend: str) -> None:
        self.rank, self.size = context.rank, len(context.ranks)
        self._ranks = context.ranks
        self._group = distributed.new_group(
            list(context.ranks),
            backend=backend,
            timeout=timedelta(seconds=context.timeout),
            use_local_synchronization=True,
            group_desc=context.name,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        _wait(self._group.allreduce([x], _REDUCE))
        return x

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        shape = x.shape or (1,)
        out = x.new_empty(self.size * shape[0], *shape[1:])
        _wait(self._group._allgather_base(out, x, _GATHER))
        dim %= len(shape)
        return out if dim == 0 else out.unflatten(0, (self.size, -1)).movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        _wait(self._group._reduce_scatter_base(out, x, _SCATTER))
        return out

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> TorchExchange:
        out = x.new_empty(sum(received), *x.shape[1:])
        work = distributed.all_to_all_single(out, x, list(received), list(sent), group=self._group, async_op=True)
        return TorchExchange(out, work)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        distributed.broadcast(x, self._ranks[source], group=self._group)
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        distributed.send(x, self._ranks[to], group=self._group)

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        distributed.recv(x, self._ranks[source], group=self._group)
        return x

    def abort(self) -> None:
        abort = getattr(self._group, "abort", None)
        if abort is not None:
            abort()

    def close(self) -> None:
        with suppress(RuntimeError, ValueError, AssertionError):  # the process group may be gone with another rank
            distributed.destroy_process_group(self._group)


class GlooCommunicator(TorchCommunicator):
    """Group of ranks on CPUs.

    gloo adds numbers of sixteen bits with a rounding after each rank, so they are added in float32 here. Its sums are
    made in another order for each part of a tensor. Where numbers must not hang on the batch, all ranks gather the
    tensors and add them in order of the ranks.
    """

    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context, "gloo")
        self._ordered = context.batch_invariant and self.size > 2  # a + b is b + a

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._ordered:
            parts = self.all_gather(x[None])
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            return total.to(x.dtype)
        if x.dtype == torch.float32:
            return super().all_reduce(x)
        return super().all_reduce(x.float()).to(x.dtype)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self.all_reduce(x).chunk(self.size)[self.rank]
        return part.clone()


def gloo(context: CommunicatorContext) -> GlooCommunicator:
    """Return a group of ranks on CPUs."""
    return GlooCommunicator(context)


def nccl(context: CommunicatorContext) -> TorchCommunicator:
    """Return a group of ranks on NVIDIA GPUs."""
    return TorchCommunicator(context, "nccl")
