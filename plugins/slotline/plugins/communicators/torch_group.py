"""Communicators `gloo` and `nccl`: collectives of torch.distributed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from attrs import define
from torch import distributed
from torch.distributed import distributed_c10d

from slotline.registry.contracts.communicator import CommunicatorContext
from slotline.registry.errors import CollectiveError


def _queued(options: Any) -> Any:
    """Return options of a collective that runs on the current stream, between what was queued before and after."""
    options.asyncOp = False
    return options


_SUM = _queued(distributed_c10d.AllreduceOptions())
_SCATTERED = _queued(distributed_c10d.ReduceScatterOptions())
_GATHERED = _queued(distributed_c10d.AllgatherOptions())  # type: ignore[attr-defined]
_EXCHANGED = distributed_c10d.AllToAllOptions()
_MOST_SENT = 8
"""Copies of sent tensors for each rank that are kept until they were received."""
_SLICE = timedelta(seconds=0.2)
"""How often a rank that waits on the host looks whether the group was aborted."""


@define(eq=False)
class TorchExchange:
    """Collective of torch.distributed that was started. See `slotline.registry.contracts.communicator.Exchange`."""

    out: torch.Tensor
    wait: Callable[[], None]

    def finish(self) -> torch.Tensor:
        """Return the result."""
        self.wait()
        return self.out


class TorchCommunicator:
    """Group of ranks. See `slotline.registry.contracts.communicator.Communicator`."""

    def __init__(self, context: CommunicatorContext, backend: str) -> None:
        self.rank, self.size = context.rank, len(context.ranks)
        self._name = context.name
        self._group = distributed.new_group(
            list(context.ranks),
            backend=backend,
            timeout=timedelta(seconds=context.timeout),
            use_local_synchronization=True,
            group_desc=context.name,
        )

    def wait(self, work: distributed.Work | None, what: str) -> None:
        """Wait for a collective: the host on the CPU, the device's queue on a GPU.

        Args:
            work: None for one that is queued on the current stream.
        """
        if work is not None:
            work.wait()

    def wait_for_peer(self, work: distributed.Work | None, what: str) -> None:
        """Wait for a sending or receiving, as `wait`."""
        self.wait(work, what)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.wait(self._group.allreduce([x], _SUM), "all_reduce")
        return x

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self.wait(self._group._allgather_base(out, x, _GATHERED), "all_gather")
        dim %= x.dim()
        return out if dim == 0 else out.unflatten(0, (self.size, x.shape[0])).movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        self.wait(self._group._reduce_scatter_base(out, x, _SCATTERED), "reduce_scatter")
        return out

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> TorchExchange:
        out = x.new_empty(sum(received), *x.shape[1:])
        work = self._group.alltoall_base(out, x, list(received), list(sent), _EXCHANGED)
        return TorchExchange(out, lambda: self.wait(work, "all_to_all"))

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        options = distributed_c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self.wait(self._group.broadcast([x], options), f"broadcast from {source}")
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        self.wait_for_peer(self._group.send([x], to, 0), f"send to {to}")

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        self.wait_for_peer(self._group.recv([x], source, 0), f"receive from {source}")
        return x

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        name = self._group.group_name
        with suppress(RuntimeError, ValueError, AssertionError):  # the process group may be gone with another rank
            distributed.destroy_process_group(self._group)
            # torch names groups by their ranks: another would find this one's addresses in the store
            distributed_c10d._world.pg_names[distributed.ProcessGroup(0, 1)] = name  # type: ignore[call-arg]


class GlooCommunicator(TorchCommunicator):
    """Group of ranks on CPUs.

    gloo adds numbers of sixteen bits with a rounding after each rank, so they are added in float32 here. Its sums are
    made in another order for each part of a tensor. Where numbers must not hang on the batch, all ranks gather the
    tensors and add them in order of the ranks. gloo cannot end a collective that waits, so the host waits in slices.
    A thread waits for a sending or receiving, which fails where a slice ends. What is sent is copied, so that the
    sender goes on.
    """

    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context, "gloo")
        self._sent: deque[tuple[distributed.Work | None, torch.Tensor]] = deque()
        self._ordered = context.batch_invariant and self.size > 2  # a + b is b + a
        self._aborted = threading.Event()

    def wait(self, work: distributed.Work | None, what: str) -> None:
        """Wait for a collective.

        Raises:
            CollectiveError: if a rank does not join it in time, or the group was aborted.
        """
        assert work is not None  # gloo works on the host
        while True:
            ended = work.is_completed()  # asked first: work may end just as a slice does
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if self._aborted.is_set() or ended:
                    raise self._failed(what, error) from error

    def wait_for_peer(self, work: distributed.Work | None, what: str) -> None:
        assert work is not None
        ended, errors = threading.Event(), list[RuntimeError]()

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(error)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        while not ended.wait(_SLICE.total_seconds()):
            if self._aborted.is_set():
                raise self._failed(what, None)
        if errors:
            raise self._failed(what, errors[0]) from errors[0]

    def _failed(self, what: str, error: RuntimeError | None) -> CollectiveError:
        why = "it was aborted" if self._aborted.is_set() else str(error)
        return CollectiveError(
            f"gloo: {what} of group {self._name!r} did not end: {why}",
            fix="see what the other ranks say, or raise parallel.timeout",
        )

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

    def send(self, x: torch.Tensor, to: int) -> None:
        kept = x.clone()
        self._sent.append((self._group.send([kept], to, 0), kept))
        while len(self._sent) > _MOST_SENT * self.size:
            self.wait_for_peer(self._sent.popleft()[0], f"send to {to}")

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self.all_reduce(x.clone()).chunk(self.size)[self.rank]
        return part.clone()

    def abort(self) -> None:
        self._aborted.set()


def gloo(context: CommunicatorContext) -> GlooCommunicator:
    """Return a group of ranks on CPUs."""
    return GlooCommunicator(context)


def nccl(context: CommunicatorContext) -> TorchCommunicator:
    """Return a group of ranks on NVIDIA GPUs."""
    return TorchCommunicator(context, "nccl")
