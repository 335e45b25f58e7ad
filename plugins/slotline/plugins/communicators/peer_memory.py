"""Communicator `peer`: sums of tensors over memory that the GPUs of one host read directly.

One kernel does a sum: each block copies its piece of the tensor to where the peers read it, tells them, waits for
theirs, and adds the pieces of all ranks in their order. That is the one-shot all-reduce of TensorRT-LLM and vLLM, in
Triton. Two copies take turns, so that nobody waits for the readers of the one before: a block counts its launches on
the device, which holds in a captured graph too. So all sums have to be queued on one stream after the other. Everything
else is NCCL's.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch.distributed import _symmetric_memory as symmetric_memory

from slotline.plugins.communicators.peer_kernel import add_peers
from slotline.plugins.communicators.torch_group import TorchCommunicator
from slotline.registry.contracts.communicator import CommunicatorContext
from slotline.registry.descriptor import DeviceInfo

CAPACITY = 16 << 20
"""Bytes of a copy. NCCL adds larger tensors, faster than this would piece by piece."""
_SIZES = (8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, CAPACITY)
"""Bytes of the tensors that are timed, to find up to which size the kernel is faster than NCCL."""
_SMALL, _SMALL_BLOCKS, _BLOCKS = 64 << 10, 8, 64
_ROUNDS = 20


class _Shared:
    """Memory that all ranks read: two copies of tensors of up to `bytes`, and the words by which blocks wait."""

    def __init__(self, communicator: PeerCommunicator, size: int, blocks: int, warps: int) -> None:
        self.bytes, self.blocks, self._warps = size, blocks, warps
        self._rank, self._size = communicator.rank, communicator.size
        words = 4 * blocks * self._size
        self._memory = symmetric_memory.empty(2 * size + words, dtype=torch.uint8, device=communicator.device)
        self._memory.zero_()
        handle = symmetric_memory.rendezvous(self._memory, group=communicator.group_name)  # type: ignore[arg-type]
        self._addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=communicator.device)
        self._epochs = torch.zeros(blocks, dtype=torch.int32, device=communicator.device)
        torch.cuda.synchronize(communicator.device)
        communicator.all_reduce_by_nccl(self._epochs.float())  # nobody signals before all words are zero
        torch.cuda.synchronize(communicator.device)

    def add(self, x: torch.Tensor) -> None:
        """Replace x, contiguous and of at most `bytes`, by the sum over the ranks."""
        add_peers[(self.blocks,)](
            x,
            x,
            self._addresses,
            self._epochs,
            x.numel(),
            self.bytes // x.element_size(),
            2 * self.bytes,
            own_rank=self._rank,
            ranks=self._size,
            width=min(32 * self._warps * 16 // x.element_size(), 4096),
            num_warps=self._warps,
        )


class PeerCommunicator(TorchCommunicator):
    """Group of ranks on GPUs of one host. See `slotline.registry.contracts.communicator.Communicator`.

    Attributes:
        device: the torch device.
        largest: bytes of the largest tensors that the kernel adds faster than NCCL, as it was timed here.
    """

    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context, "nccl")
        self.device = torch.device(context.device)
        with torch.cuda.device(self.device):
            self._small = _Shared(self, _SMALL, _SMALL_BLOCKS, 8)
            self._large = _Shared(self, CAPACITY, _BLOCKS, 16)
            self.largest = self._faster_up_to()

    @property
    def group_name(self) -> str:
        """Name of the process group."""
        return str(self._group.group_name)

    def all_reduce_by_nccl(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum by NCCL. x is overwritten."""
        return super().all_reduce(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        size = x.numel() * x.element_size()
        if size > self.largest or not x.is_contiguous() or x.dtype not in _DTYPES or x.data_ptr() % 16:
            return super().all_reduce(x)
        if size <= _SMALL:
            self._small.add(x)
        else:
            self._large.add(x)
        return x

    def _faster_up_to(self) -> int:
        """Return the size up to which the kernel is faster, on the slowest of the ranks."""
        largest = 0
        for size in _SIZES:
            x = torch.zeros(size // 2, dtype=torch.bfloat16, device=self.device)
            shared = self._small if size <= _SMALL else self._large
            own = self._slowest(lambda shared=shared, x=x: shared.add(x))
            nccl = self._slowest(lambda x=x: self.all_reduce_by_nccl(x))
            if own > nccl:
                return largest
            largest = size
        return largest

    def _slowest(self, work: Any) -> float:
        """Return the seconds that some work takes on the slowest rank."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        work()
        torch.cuda.synchronize(self.device)  # launches on two streams would count as one
        with torch.cuda.stream(stream):
            work()
            torch.cuda.synchronize(self.device)
            graph.capture_begin()
            for _ in range(_ROUNDS):
                work()
            graph.capture_end()
        graph.replay()
        torch.cuda.synchronize(self.device)
        start = perf_counter()
        graph.replay()
        torch.cuda.synchronize(self.device)
        spent = torch.tensor([perf_counter() - start], dtype=torch.float32, device=self.device)
        return float(self.all_gather(spent).max())


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def probe(device: DeviceInfo) -> Any:
    """Return the capabilities, or why the GPUs of this machine cannot read each other's memory."""
    from slotline.plugins.communicators.descriptors import peer

    count = torch.cuda.device_count()
    if any(not torch.cuda.can_device_access_peer(0, other) for other in range(1, count)):
        return "the GPUs of this machine cannot read each other's memory"
    if count < 2:
        return "this machine has one GPU"
    return peer.capabilities


def factory(context: CommunicatorContext) -> PeerCommunicator:
    """Return a group of ranks on GPUs that read each other's memory."""
    return PeerCommunicator(context)
