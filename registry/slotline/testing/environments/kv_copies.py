"""Copies between the blocks of a simulated pool and rows of host memory, for KV connectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from attrs import define, field

from slotline.registry.contracts import ConnectorGroup
from slotline.testing.check import Failed


@define(eq=False)
class Begun:
    """Copies that were begun. They are over when it is asked for the second time, or earlier if something needs them.

    Attributes:
        work: does them.
        addresses: of their rows.
        writes_rows: whether they write the rows.
        asked: how often somebody has asked whether they are over.
        over: whether they are.
    """

    work: Callable[[], Any]
    addresses: set[int]
    writes_rows: bool
    asked: int = 0
    over: bool = False
    _lock: Lock = field(factory=Lock)

    def is_over(self) -> bool:
        """Return whether they are over."""
        self.asked += 1
        if self.asked > 1:
            self.end()
        return self.over

    def end(self) -> None:
        """Do them, or wait for a thread that does."""
        with self._lock:
            if not self.over:
                self.work()
                self.over = True


@define(eq=False)
class PoolCopy:
    """Implements `BlockCopyBeside` and `LayerBlockCopy`.

    Attributes:
        groups: of the blocks.
        bytes: of each group, [blocks, block_bytes] uint8.
        numbers: of the blocks of each group. The first is that of the first row, and 0 is no block.
        begun: copies that were begun and are not known to be over.
    """

    groups: Sequence[ConnectorGroup]
    bytes: Sequence[torch.Tensor]
    numbers: Sequence[range]
    begun: list[Begun] = field(factory=list)

    def to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """See `BlockCopy`."""
        self._check(group, blocks, rows)
        self._await(rows, self.begun)
        for block, row in zip(blocks, rows, strict=True):
            row.copy_(self._block(group, block))

    def to_device(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """See `BlockCopy`."""
        self._check(group, blocks, rows)
        self._await(rows, [one for one in self.begun if one.writes_rows])
        for block, row in zip(blocks, rows, strict=True):
            self._block(group, block).copy_(row)

    def begin_to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Callable[[], bool]:
        """See `BlockCopyBeside`. The rows have their bytes when it is asked for the second time."""
        copies = [torch.empty_like(row) for row in rows]
        self.to_host(group, blocks, copies)
        self._check(group, blocks, rows)
        pairs = list(zip(rows, copies, strict=True))
        return self._begin(rows, lambda: [row.copy_(copy) for row, copy in pairs], writes_rows=True)

    def begin_to_device(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Callable[[], bool]:
        """See `BlockCopyBeside`. The blocks have their bytes when it is asked for the second time."""
        self._check(group, blocks, rows)
        return self._begin(rows, lambda: self.to_device(group, blocks, rows), writes_rows=False)

    def begin_layer_to_host(
        self, group: int, layer: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]
    ) -> Callable[[], bool]:
        """See `LayerBlockCopy`. The rows have their bytes when it is asked for the second time."""
        self._check(group, blocks, rows)
        if layer not in range(len(self.groups[group].layers)):
            raise Failed(f"a copy of the layer {layer} of group {group}, which has {len(self.groups[group].layers)}")
        first, end = part_of(self.groups[group], layer)
        copies = [self._block(group, block)[first:end].to("cpu", copy=True) for block in blocks]
        parts = [(row[first:end], copy) for row, copy in zip(rows, copies, strict=True)]
        return self._begin(rows, lambda: [part.copy_(copy) for part, copy in parts], writes_rows=True)

    def _begin(self, rows: Sequence[torch.Tensor], work: Callable[[], Any], *, writes_rows: bool) -> Callable[[], bool]:
        begun = Begun(work, {row.data_ptr() for row in rows}, writes_rows)
        self.begun = [*(one for one in self.begun if not one.over), begun]
        return begun.is_over

    def _await(self, rows: Sequence[torch.Tensor], copies: Sequence[Begun]) -> None:
        """End those of the copies that have one of these rows, also if a thread is about to."""
        addresses = {row.data_ptr() for row in rows}
        for one in copies:
            if not one.addresses.isdisjoint(addresses):
                one.end()

    def _block(self, group: int, block: int) -> torch.Tensor:
        return self.bytes[group][block - self.numbers[group].start]

    def _check(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        size, known = self.groups[group].block_bytes, set(self.numbers[group]) - {0}
        if len(blocks) != len(rows) or len(set(blocks)) != len(blocks) or not known.issuperset(blocks):
            raise Failed(f"a copy of the blocks {list(blocks)} and {len(rows)} rows: distinct ones, a row for each")
        for row in rows:
            if row.shape != (size,) or row.dtype is not torch.uint8 or row.device.type != "cpu":
                found = f"{row.dtype} {tuple(row.shape)} on {row.device}"
                raise Failed(f"a row is {found}, expected uint8 ({size},) on cpu")


def part_of(group: ConnectorGroup, layer: int) -> tuple[int, int]:
    """Return the first byte and the end of the layer at a position in a block."""
    sizes = group.layer_bytes
    return sum(sizes[:layer]), sum(sizes[: layer + 1])
