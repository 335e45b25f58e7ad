"""Whole blocks between the caches and host memory, whatever their layout: a block is the bytes of its layers.

The blocks are gathered on the device first, so that one copy carries each of them over, and not one for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from attrs import frozen

from slotline.core.uploads import sent

STAGING_BYTES = 64 * 2**20
"""Gathered on a device at a time, at most, unless a single block is larger."""

WORD = 8


@frozen(eq=False)
class Segment:
    """Neighbouring layers of a group on one device.

    Attributes:
        pages: of each layer, [num_blocks, ratio, words] int64, or uint8 where the pages are no whole words.
        first, end: their bytes in a block.
    """

    pages: tuple[torch.Tensor, ...]
    first: int
    end: int

    def staging(self, count: int) -> torch.Tensor:
        """[count, bytes] uint8 on the device, not filled."""
        return torch.empty((count, self.end - self.first), dtype=torch.uint8, device=self.pages[0].device)

    def parts(self, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's pages, and its columns of `staged` as [count, ratio, words]."""
        words, first = staged.view(self.pages[0].dtype), 0
        for pages in self.pages:
            size = pages[0].numel()
            yield pages, words[:, first : first + size].unflatten(1, pages.shape[1:])
            first += size


class CacheBlockCopy:
    """Copies blocks of each cache group. Implements `BlockCopy`.

    Args:
        groups: of each group, each layer's memory [num_blocks, ratio, bytes] uint8, of which the last dimension is
            contiguous.

    Attributes:
        block_bytes: of one block over all layers, by group.
    """

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self._segments = [_segments(pages) for pages in groups]
        self.block_bytes = [segments[-1].end if segments else 0 for segments in self._segments]

    def to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Read `blocks` into `rows`, as many."""

        def read(segment: Segment, ids: torch.Tensor, own: Sequence[torch.Tensor]) -> None:
            staged = segment.staging(len(own))
            for pages, part in segment.parts(staged):
                part.copy_(pages.index_select(0, ids))
            for row, block in zip(own, staged, strict=True):
                row[segment.first : segment.end].copy_(block, non_blocking=True)

        self._each(group, blocks, rows, read)

    def to_device(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Write `rows` into `blocks`, as many; the blocks are distinct."""

        def write(segment: Segment, ids: torch.Tensor, own: Sequence[torch.Tensor]) -> None:
            staged = segment.staging(len(own))
            for row, block in zip(own, staged, strict=True):
                block.copy_(row[segment.first : segment.end], non_blocking=True)
            for pages, part in segment.parts(staged):
                pages.index_copy_(0, ids, part)

        self._each(group, blocks, rows, write)

    def _each(
        self,
        group: int,
        blocks: Sequence[int],
        rows: Sequence[torch.Tensor],
        copy: Callable[[Segment, torch.Tensor, Sequence[torch.Tensor]], None],
    ) -> None:
        most = max(1, STAGING_BYTES // max(1, self.block_bytes[group]))
        for first in range(0, len(blocks), most):
            own = slice(first, first + most)
            for segment in self._segments[group]:
                copy(segment, sent(np.array(blocks[own], np.int64), segment.pages[0].device), rows[own])


def _segments(layers: Sequence[torch.Tensor]) -> list[Segment]:
    """Runs of layers on one device."""
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
        if found and found[-1].pages[0].device == layer.device:
            found[-1] = Segment((*found[-1].pages, pages), found[-1].first, end)
        else:
            found.append(Segment((pages,), first, end))
    return found
