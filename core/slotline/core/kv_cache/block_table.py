"""Block tables of a batch, in batch order, as attention reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.device.torch_device import TorchDevice
from slotline.core.device.transfer_buffer import TransferBuffer, reserved_bytes
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.registry.contracts import Device

Int = npt.NDArray[np.int64]


class BlockTables(Protocol):
    """Gathers the block tables of a step's rows. Call `stage` before the step's uploads are flushed, `take` after."""

    num_bytes: int

    def stage(self, rows: Int) -> None:
        """Upload the inputs of `take` for `rows` [n]. The row after the last request's serves padded requests."""
        ...

    def take(self, longest: int) -> list[torch.Tensor]:
        """Return for each cache group the kernel blocks of sequences of up to `longest` tokens, [n, width] int32."""
        ...


class HostTables:
    """Block tables for a device that shares the host's memory: the rows are indexed on the host.

    Attributes:
        num_bytes: upload bytes of one step.
    """

    def __init__(self, groups: Sequence[CacheGroup], kernel_block_sizes: Sequence[int]) -> None:
        self.num_bytes = 0
        self._groups = tuple(zip(groups, kernel_block_sizes, strict=True))
        self._rows: Int = np.zeros(0, np.int64)

    def stage(self, rows: Int) -> None:
        """Remember the rows."""
        self._rows = rows

    def take(self, longest: int) -> list[torch.Tensor]:
        """Return the tables, as wide as the longest sequence needs."""
        return [
            torch.from_numpy(group.table[:, : group.columns(longest, size)][self._rows]) for group, size in self._groups
        ]


class DeviceTables:
    """Block tables of all rows on a device. Uploads only changed rows and gathers the batch's rows on the device.

    The batch's tables always have the same address, so that graphs can read them.

    Attributes:
        num_bytes: upload bytes of one step at most.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        kernel_block_sizes: Sequence[int],
        staging: TransferBuffer,
        device: str,
        hardware: Device | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._sizes = tuple(kernel_block_sizes)
        self._staging, self._device = staging, device
        shapes = [group.table.shape for group in groups]
        self.num_bytes = sum(reserved_bytes(s, np.int32) + 2 * reserved_bytes((s[0],), np.int64) for s in shapes)
        self._tables = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]
        self._taken = [torch.zeros_like(table) for table in self._tables]
        self._views: list[tuple[int, int, torch.Tensor] | None] = [None for _ in shapes]  # as last taken
        self._seen = [np.zeros(shape[0], np.int64) for shape in shapes]  # the versions that the device has
        self._rows = torch.zeros(0, dtype=torch.int64, device=device)
        self._changes: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        hardware = hardware or TorchDevice(device, device)
        self._put_rows, self._gather_rows = hardware.ops.put_rows, hardware.ops.gather_rows
        self._scope = hardware.scope
        for table in self._tables:  # compile kernels now, so that no step waits for them
            with self._scope():
                self._put_rows(table, torch.zeros(1, dtype=torch.int64, device=device), torch.zeros_like(table[:1]))

    def stage(self, rows: Int) -> None:
        """Upload the row numbers, and the tables of rows that changed since the last step."""
        self._rows = self._staging.upload(rows)
        self._changes = [self._stage_changes(*pair) for pair in zip(self._groups, self._seen, strict=True)]

    def take(self, longest: int) -> list[torch.Tensor]:
        """Apply the changes, then gather."""
        for table, taken, changes in zip(self._tables, self._taken, self._changes, strict=True):
            with self._scope():
                if changes is not None:
                    self._put_rows(table, *changes)
                self._gather_rows(table, self._rows, taken)
        self._changes = []
        return self.views(longest)

    def views(self, longest: int) -> list[torch.Tensor]:
        """Return the tables taken last, as wide as sequences of up to `longest` tokens need."""
        return [self._view(i, longest) for i in range(len(self._groups))]

    def changed(self, index: int, rows: Int) -> Int:
        """Return positions in `rows` [n] whose tables are newer than the device's, and mark them as uploaded."""
        seen, versions = self._seen[index], self._groups[index].versions[rows]
        changed: Int = np.flatnonzero(versions != seen[rows])
        seen[rows] = versions
        return changed

    def held(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the step's rows [n] int64, the tables of all rows in a cache group, and those of the step's rows."""
        return self._rows, self._tables[index], self._taken[index]

    def _view(self, index: int, longest: int) -> torch.Tensor:
        """Return a cache group's taken tables, as wide as the longest sequence needs. Reuses a view of equal size."""
        count, columns = len(self._rows), self._groups[index].columns(longest, self._sizes[index])
        last = self._views[index]
        if last is None or last[:2] != (count, columns):
            last = self._views[index] = (count, columns, self._taken[index][:count, :columns])
        return last[2]

    def _stage_changes(self, group: CacheGroup, seen: Int) -> tuple[torch.Tensor, torch.Tensor] | None:
        changed = np.flatnonzero(group.versions != seen)
        if len(changed) == 0:
            return None
        seen[changed] = group.versions[changed]
        return self._staging.upload(changed), self._staging.upload(group.table[changed])


def tables_for(
    groups: Sequence[CacheGroup],
    kernel_block_sizes: Sequence[int],
    staging: TransferBuffer,
    device: Device,
    *,
    on_host: bool,
) -> BlockTables:
    """Return the tables of a device, which may compute in the host's memory."""
    if on_host:
        return HostTables(groups, kernel_block_sizes)
    return DeviceTables(groups, kernel_block_sizes, staging, device.torch_device, device)
