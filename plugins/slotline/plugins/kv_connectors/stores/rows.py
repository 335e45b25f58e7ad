"""Rows of host memory in which blocks lie on their way, of the process alone or of several processes."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from slotline.plugins.kv_connectors.stores.block_store import Place
from slotline.registry.errors import CapacityError


class SharedBytes:
    """Memory that other processes can map, pinned where the device is a GPU.

    Args:
        num_bytes: of it.
        pinned: whether it is pinned.
        what: the option that says how much, for errors.

    Attributes:
        handle: of the memory, for other processes.
        data: [num_bytes] uint8.

    Raises:
        CapacityError: if the memory cannot be had.
    """

    def __init__(self, num_bytes: int, *, pinned: bool, what: str) -> None:
        try:
            self.handle = os.memfd_create("slotline-kv-rows", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.handle)
            os.ftruncate(self.handle, num_bytes)
            self.data = torch.frombuffer(mmap.mmap(self.handle, num_bytes), dtype=torch.uint8)
            if pinned:
                _pin(self.data)
                weakref.finalize(self, _unpin, self.data.data_ptr()).atexit = False
        except (RuntimeError, OSError) as error:
            raise CapacityError(f"{what} cannot be had: {error}", fix="lower it") from error


class Rows:
    """Rows of host memory, [count, size] uint8, pinned where the device is a GPU.

    Args:
        num_bytes: of all rows. There is one at least.
        size: bytes of a row.
        pinned: whether they are pinned.
        what: the option that says how much, for errors.
        memory: that they lie in, [num_bytes or size] uint8 at least. None for memory of their own.

    Attributes:
        taken: number of rows that are taken.

    Raises:
        CapacityError: if the memory cannot be had.
    """

    def __init__(
        self, num_bytes: int, size: int, *, pinned: bool, what: str, memory: torch.Tensor | None = None
    ) -> None:
        shape = (max(1, num_bytes // size), size)
        try:
            if memory is None:
                self._rows = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
            else:
                self._rows = memory[: shape[0] * size].view(shape)
        except RuntimeError as error:
            raise CapacityError(f"{what} cannot be had: {error}", fix="lower it") from error
        self._fresh, self.taken = iter(range(shape[0])), 0
        self._free = list[torch.Tensor]()  # of those that have been taken before

    def take(self) -> torch.Tensor | None:
        """Return a free row, None if there is none."""
        if self._free:
            self.taken += 1
            return self._free.pop()
        if (number := next(self._fresh, None)) is None:
            return None
        self.taken += 1
        return self._rows[number]

    def give_back(self, rows: Sequence[torch.Tensor]) -> None:
        """Take rows back."""
        self._free += rows
        self.taken -= len(rows)


def place_of(row: torch.Tensor, size: int) -> Place:
    """Return the place of a block of `size` bytes in a row of shared memory."""
    return Place(int(row.storage_offset()), size)


def _pin(memory: torch.Tensor) -> None:
    """Pin memory of the process. Raises RuntimeError if that cannot be done."""
    if error := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)):
        raise RuntimeError(f"CUDA does not pin {memory.numel()} bytes, and says {error}")


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
