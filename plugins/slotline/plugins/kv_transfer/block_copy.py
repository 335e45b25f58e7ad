"""Copies of whole blocks between the caches and host memory, for any layout: a block is the bytes of its layers.

The blocks are gathered on the device first, so that one copy transfers a whole block instead of one copy a layer. If
the device has streams these copies run in their own: the forward pass after a save waits only for the gathering, as
long as the staging buffers suffice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen

from slotline.core.device.torch_device import OrderedCopies
from slotline.kernels.async_copy import to_device
from slotline.registry.contracts import CopyStream

STAGING_BYTES = 128 * 2**20
"""Size of each of a device's two staging buffers, unless a single block is larger."""

BESIDE_BYTES = 64 * 2**20
"""Size of each of the two buffers of loads beside forward passes, unless a single block is larger."""

WORD = 8


def is_over(event: Any, device: torch.device) -> bool:
    """Return whether an event of a device has happened. Wait for the device if nobody can ask for its events."""
    if event is None:
        return True
    if not hasattr(event, "query"):
        torch.get_device_module(device).synchronize(device)
        return True
    return bool(event.query())


class Lane:
    """A device's two staging buffers, used alternately, and the queue that copies while the device works.

    Args:
        device: on which the buffers are allocated.
        num_bytes: size of each buffer. The buffers are allocated at first use.
        copies: the queue.

    Attributes:
        saved: event after the last copies to host memory, None if there were none.
        reading: copies from host memory beside forward passes, each an event after it and the addresses of its rows.
    """

    def __init__(self, device: torch.device, num_bytes: int, copies: CopyStream) -> None:
        self.device = device
        self._num_bytes = num_bytes
        self._copies = copies
        self._buffers: list[tuple[torch.Tensor, Any]] = []  # each with an event after its last use
        self.saved: Any = None
        self.reading: deque[tuple[Any, set[int]]] = deque()

    def from_device(self, count: int, size: int) -> torch.Tensor:
        """Return a buffer [count, size] uint8 that computations may write."""
        buffer, used = self._take()
        self._copies.wait(used, copies=False)
        return buffer[: count * size].view(count, size)

    def to_rows(
        self, staged: torch.Tensor, rows: Sequence[torch.Tensor], whole: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Copy the output of the computations so far to the rows of host memory, or to parts of `whole` rows."""
        self._copies.wait_for_compute()
        self.forget_read()
        for read, addresses in self.reading:
            if any(row.data_ptr() in addresses for row in whole or rows):
                self._copies.wait(read, copies=True)
        with self._copies.scope():
            for row, block in zip(rows, staged, strict=True):
                row.copy_(block, non_blocking=True)
        self._put_back(copies=True)
        self.saved = self._copies.record(copies=True)

    def forget_read(self) -> None:
        """Forget copies beside forward passes that are over."""
        while self.reading and self.is_over(self.reading[0][0]):
            self.reading.popleft()

    def is_over(self, event: Any) -> bool:
        """Return whether an event has happened. Wait for the device if nobody can ask for its events."""
        return is_over(event, self.device)

    def from_rows(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return rows of host memory for computations, [len(rows), size] uint8. Call `put_back` after reading."""
        buffer, used = self._take()
        size = rows[0].numel()
        staged = buffer[: len(rows) * size].view(len(rows), size)
        with self._copies.scope():
            self._copies.wait(used, copies=True)
            for row, block in zip(rows, staged, strict=True):
                block.copy_(row, non_blocking=True)
        self._copies.compute_waits()
        return staged

    def put_back(self) -> None:
        """Record that the computations so far have read the buffer of `from_rows`."""
        self._put_back(copies=False)

    def _take(self) -> tuple[torch.Tensor, Any]:
        """Return the buffer whose turn it is."""
        if not self._buffers:
            for _ in range(2):
                buffer = torch.empty(self._num_bytes, dtype=torch.uint8, device=self.device)
                self._buffers.append((buffer, self._copies.record(copies=False)))
        return self._buffers[0]

    def _put_back(self, *, copies: bool) -> None:
        """Record the copies or computations so far as the buffer's last use, and switch to the other buffer."""
        buffer, _ = self._buffers.pop(0)
        self._buffers.append((buffer, self._copies.record(copies=copies)))


class LaneBeside:
    """Two buffers of a device in which rows lie before blocks are written, beside the forward passes.

    Args:
        lane: the device's staging buffers.
        num_bytes: size of each buffer. The buffers are allocated at first use.
        rows, blocks: the queues that read rows and that write blocks.
    """

    def __init__(self, lane: Lane, num_bytes: int, rows: CopyStream, blocks: CopyStream) -> None:
        self._lane, self._num_bytes = lane, num_bytes
        self._rows, self._blocks = rows, blocks
        self._buffers: list[tuple[torch.Tensor, Any]] = []  # each with an event after its last use

    def begin(self) -> None:
        """Let what follows come after the computations and the saves so far.

        These may read the blocks that are to be written, or write the rows that are to be read.
        """
        self._lane.forget_read()
        if not self._buffers:
            for _ in range(2):
                self._buffers.append((torch.empty(self._num_bytes, dtype=torch.uint8, device=self._lane.device), None))
            self._rows.wait_for_compute()  # the memory may have been another's
        self._blocks.wait_for_compute()
        if self._lane.saved is not None:
            self._rows.wait(self._lane.saved, copies=True)

    def write(self, rows: Sequence[torch.Tensor], scatter: Callable[[torch.Tensor], None]) -> None:
        """Copy rows to the device, then call `scatter` with them, [len(rows), size] uint8, to write the blocks."""
        (buffer, used), size = self._buffers.pop(0), rows[0].numel()
        staged = buffer[: len(rows) * size].view(len(rows), size)
        if used is not None:
            self._rows.wait(used, copies=True)
        with self._rows.scope():
            for row, block in zip(rows, staged, strict=True):
                block.copy_(row, non_blocking=True)
        read = self._rows.record(copies=True)
        self._lane.reading.append((read, {row.data_ptr() for row in rows}))
        if read is not None:
            self._blocks.wait(read, copies=True)
        with self._blocks.scope():
            scatter(staged)
        self._buffers.append((buffer, self._blocks.record(copies=True)))

    def end(self) -> Callable[[], bool]:
        """Return a function that says whether all blocks are written that were to be."""
        return partial(self._lane.is_over, self._blocks.record(copies=True))


@frozen(eq=False)
class Segment:
    """Adjacent layers of a group on one device.

    Attributes:
        lane: the device's staging buffers.
        beside: its buffers of loads beside forward passes, None where all copies are in order.
        pages: of each layer, [num_blocks, ratio, words] int64, or uint8 if the pages are not whole words.
        first, end: the range of their bytes in a block.
    """

    lane: Lane
    beside: LaneBeside | None
    pages: tuple[torch.Tensor, ...]
    first: int
    end: int

    def cut(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the segment's part of each row."""
        return [row[self.first : self.end] for row in rows]

    def parts(self, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer's pages, and its columns of `staged` as [count, ratio, words]."""
        words, first = staged.view(self.pages[0].dtype), 0
        for pages in self.pages:
            size = pages[0].numel()
            yield pages, words[:, first : first + size].unflatten(1, pages.shape[1:])
            first += size


@frozen(eq=False)
class HostPages:
    """Layers of a group in the memory of the process. Each copy is one of memory, by the thread that asks for it.

    torch would divide a copy of some dozens of kilobytes among threads, and wait for the slowest of them.

    Attributes:
        pages: of each layer, [num_blocks, ratio, bytes].
    """

    pages: tuple[npt.NDArray[np.uint8], ...]

    def read(self, block: int, row: torch.Tensor) -> None:
        """Copy a block to a row."""
        for pages, part in self._parts(row):
            part[:] = pages[block]

    def read_layer(self, layer: int, block: int, part: torch.Tensor) -> None:
        """Copy a layer's part of a block to its part of a row."""
        pages = self.pages[layer]
        part.numpy().reshape(pages.shape[1:])[:] = pages[block]

    def write(self, block: int, row: torch.Tensor) -> None:
        """Copy a row to a block."""
        for pages, part in self._parts(row):
            pages[block] = part

    def _parts(self, row: torch.Tensor) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Yield each layer's pages with its part of a row, [ratio, bytes]."""
        data, first = row.numpy(), 0
        for pages in self.pages:
            end = first + pages.shape[1] * pages.shape[2]
            yield pages, data[first:end].reshape(pages.shape[1:])
            first = end


class CacheBlockCopy:
    """Copier of the blocks of each cache group. Implements `BlockCopyBeside` and `LayerBlockCopy`.

    Args:
        groups: memory of each layer of each group, [num_blocks, ratio, bytes] uint8, with a contiguous last dimension.
        copies: makes a queue of copies of a device.
        first: number of the first block of each group. Empty for 0.

    Attributes:
        block_bytes: bytes of one block over all layers, by group.
        layer_bytes: of each layer, by group.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        copies: Callable[[torch.device], CopyStream] = lambda _: OrderedCopies(),
        first: Sequence[int] = (),
    ) -> None:
        self._first = first or [0] * len(groups)
        self.layer_bytes = [tuple(pages[0].numel() for pages in layers) for layers in groups]
        self.block_bytes = [sum(sizes) for sizes in self.layer_bytes]
        devices = dict.fromkeys(pages.device for layers in groups for pages in layers)
        largest = max(STAGING_BYTES, *self.block_bytes)
        lanes = {device: Lane(device, largest, copies(device)) for device in devices}
        # In host memory a thread may read blocks while another one writes to others.
        more = {one: Lane(one, largest, copies(one)) if one.type == "cpu" else lanes[one] for one in devices}
        largest = max(BESIDE_BYTES, *self.block_bytes)
        besides = {device: _beside(lane, largest, copies) for device, lane in lanes.items()}
        self._segments = [_segments(layers, lanes, besides) for layers in groups]
        self._writers = [_segments(layers, more, besides) for layers in groups]
        self._host = [_host_pages(layers) if None in besides.values() else None for layers in groups]

    def to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Read `blocks` into the same number of `rows`."""
        if (host := self._host[group]) is not None:
            for block, row in zip(blocks, rows, strict=True):
                host.read(block - self._first[group], row)
            return
        for segment, ids, own in self._pieces(self._segments, group, blocks, rows):
            staged = segment.lane.from_device(len(own), segment.end - segment.first)
            for pages, part in segment.parts(staged):
                part.copy_(pages.index_select(0, ids))
            segment.lane.to_rows(staged, own)

    def begin_layer_to_host(
        self, group: int, layer: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]
    ) -> Callable[[], bool]:
        """Read the part of the layer at a position of `blocks` into its place in the same number of `rows`.

        Return a function that says whether these have the bytes.
        """
        first, size = sum(self.layer_bytes[group][:layer]), self.layer_bytes[group][layer]
        parts = [row[first : first + size] for row in rows]
        if (host := self._host[group]) is not None:
            for block, part in zip(blocks, parts, strict=True):
                host.read_layer(layer, block - self._first[group], part)
            return lambda: True
        segment = next(one for one in self._segments[group] if one.first <= first < one.end)
        pages = segment.pages[layer - sum(len(one.pages) for one in self._segments[group] if one.end <= first)]
        most = STAGING_BYTES // size or 1
        for start in range(0, len(blocks), most):
            own = slice(start, start + most)
            staged = segment.lane.from_device(len(parts[own]), size)
            ids = self._ids(group, blocks[own], segment)
            staged.view(pages.dtype).copy_(pages.index_select(0, ids).flatten(1))
            segment.lane.to_rows(staged, parts[own], segment.cut(rows[own]))
        return partial(segment.lane.is_over, segment.lane.saved)

    def to_device(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Write `rows` into the same number of `blocks`, which are distinct."""
        if (host := self._host[group]) is not None:
            for block, row in zip(blocks, rows, strict=True):
                host.write(block - self._first[group], row)
            return
        for segment, ids, own in self._pieces(self._writers, group, blocks, rows):
            for pages, part in segment.parts(segment.lane.from_rows(own)):
                pages.index_copy_(0, ids, part)
            segment.lane.put_back()

    def begin_to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Callable[[], bool]:
        """Read `blocks` into the same number of `rows`. Return a function that says whether these have the bytes."""
        self.to_host(group, blocks, rows)
        saved = [partial(segment.lane.is_over, segment.lane.saved) for segment in self._segments[group]]
        return lambda: all(is_over() for is_over in saved)

    def begin_to_device(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Callable[[], bool]:
        """Write `rows` into `blocks` beside the forward passes. Return a function that says whether they are written.

        The caller launches no forward pass that reads the blocks before.
        """
        most, written = BESIDE_BYTES // self.block_bytes[group] or 1, list[Callable[[], bool]]()
        for segment in self._segments[group]:
            if segment.beside is None:
                self.to_device(group, blocks, rows)
                return lambda: True
            segment.beside.begin()
            for first in range(0, len(blocks), most):
                own = slice(first, first + most)
                write = partial(self._scatter, segment, group, blocks[own])
                segment.beside.write(segment.cut(rows[own]), write)
            written.append(segment.beside.end())
        return lambda: all(is_over() for is_over in written)

    def _scatter(self, segment: Segment, group: int, blocks: Sequence[int], staged: torch.Tensor) -> None:
        """Write staged rows into the pages of a segment's layers."""
        ids = self._ids(group, blocks, segment)
        for pages, part in segment.parts(staged):
            pages.index_copy_(0, ids, part)

    def _ids(self, group: int, blocks: Sequence[int], segment: Segment) -> torch.Tensor:
        """Return the numbers of blocks among a segment's pages, on its device."""
        return to_device(np.array(blocks, np.int64) - self._first[group], segment.lane.device)

    def _pieces(
        self, segments: list[list[Segment]], group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Segment, torch.Tensor, list[torch.Tensor]]]:
        """Yield segment, block ids on the device and parts of rows for at most a staging buffer of blocks at a time."""
        most = STAGING_BYTES // self.block_bytes[group] or 1
        for first in range(0, len(blocks), most):
            own = slice(first, first + most)
            for segment in segments[group]:
                yield segment, self._ids(group, blocks[own], segment), segment.cut(rows[own])


def _beside(lane: Lane, num_bytes: int, copies: Callable[[torch.device], CopyStream]) -> LaneBeside | None:
    """Return the buffers of a device's loads beside forward passes, None where all copies are in order."""
    rows, blocks = copies(lane.device), copies(lane.device)
    return None if isinstance(rows, OrderedCopies) else LaneBeside(lane, num_bytes, rows, blocks)


def _host_pages(layers: Sequence[torch.Tensor]) -> HostPages | None:
    """Return a group's layers where all of them are in the memory of the process."""
    here = all(pages.device.type == "cpu" for pages in layers)
    return HostPages(tuple(pages.numpy() for pages in layers)) if here else None


def _segments(
    layers: Sequence[torch.Tensor], lanes: dict[torch.device, Lane], besides: dict[torch.device, LaneBeside | None]
) -> list[Segment]:
    """Split a group's layers into runs of layers on one device."""
    whole = all(
        layer.shape[-1] % WORD == 0
        and layer.storage_offset() % WORD == 0
        and all(stride % WORD == 0 for stride in layer.stride()[:-1])
        for layer in layers
    )
    found: list[Segment] = []
    for layer in layers:
        pages, first = layer.view(torch.int64) if whole else layer, found[-1].end if found else 0
        end = first + layer[0].numel()
        if found and found[-1].lane.device == layer.device:
            found[-1] = evolve(found[-1], pages=(*found[-1].pages, pages), end=end)
        else:
            found.append(Segment(lanes[layer.device], besides[layer.device], (pages,), first, end))
    return found
