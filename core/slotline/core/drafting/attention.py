"""Attention of a drafter's own layers, which lie in the model's cache groups and have its requests' blocks.

What a step computed is attended over under the step's own plans. Behind it a drafter goes on by itself, one token of
each request at a time; keys and values of those are guesses, overwritten when the model has computed the places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.cache.block_pool import NULL_BLOCK
from slotline.core.cache.manager import CacheGroup
from slotline.core.execution.attention import Attend, AttentionRouter, StepPlans
from slotline.core.execution.staging import reserved_bytes
from slotline.registry.contracts import AttentionBatch, AttentionLayer

Int = npt.NDArray[np.int64]


class Places(NamedTuple):
    """Where drafts go, on the device, by offset behind the newest tokens.

    `seq_lens` [num_tokens, n] int32, `positions` [num_tokens, n] int64, `slots` [num_tokens, n] int64 by cache group.
    """

    seq_lens: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]


@frozen(eq=False)
class StagedAttention:
    """Attention of a proposal whose positions are known on the device alone: `tables` [n, width] by cache group."""

    _attention: DraftAttention
    _starts: npt.NDArray[np.int32]
    _starts_device: torch.Tensor
    _seq_lens: npt.NDArray[np.int32]
    tables: list[torch.Tensor]

    def __call__(self, positions: torch.Tensor) -> Callable[[int], Attend]:
        """See `DraftBatch.attend`, for the positions [n] of the newest tokens."""
        places = self._attention.places(positions, self.tables)
        return self._attention.attend(self._starts, self._starts_device, self._seq_lens, places, self.tables)


@frozen(eq=False)
class CapturedAttention:
    """The same at fixed addresses, every step planned for the longest sequences.

    Attributes:
        positions: [size] int64, of the newest tokens; negative for a padded request.
    """

    _attention: DraftAttention
    _router: AttentionRouter
    positions: torch.Tensor
    _tables: list[torch.Tensor]
    _places: Places
    _batches: list[list[AttentionBatch]]  # what the plans were made of, which captured kernels read
    _plans: list[StepPlans]

    def fill(self, staged: StagedAttention) -> None:
        """Copy block tables, before a replay."""
        for own, table in zip(self._tables, staged.tables, strict=True):
            own[: table.shape[0], : table.shape[1]].copy_(table)

    def refresh(self) -> None:
        """Find the places behind `positions`, inside the graph."""
        found = self._attention.places(self.positions, self._tables)
        self._places.seq_lens.copy_(found.seq_lens)
        self._places.positions.copy_(found.positions)
        for own, slots in zip(self._places.slots, found.slots, strict=True):
            own.copy_(slots)

    def attend(self, offset: int) -> Attend:
        """See `DraftBatch.attend`."""
        return self._router.under(self._plans[offset])


class DraftAttention:
    """Plans a drafter's steps.

    Args:
        router: of all layers; `layers` the drafter's own.
        groups: all cache groups, in order; `kernel_block_sizes` theirs.
        num_tokens: draft tokens.
        device: torch device string.
    """

    def __init__(
        self,
        router: AttentionRouter,
        layers: Sequence[AttentionLayer],
        groups: Sequence[CacheGroup],
        kernel_block_sizes: Sequence[int],
        *,
        max_model_len: int,
        num_tokens: int,
        device: str,
    ) -> None:
        self._router, read = router.part(layers)
        self._groups = [(groups[index], kernel_block_sizes[index]) for index in read]
        self._max_model_len = max_model_len
        self._offsets = np.arange(num_tokens)[:, None]
        self._steps = torch.arange(num_tokens, device=device)[:, None]
        self._device = device

    def reserved_bytes(self, max_requests: int) -> int:
        """What `stage` uploads at most."""
        tables = sum(reserved_bytes((max_requests, group.table.shape[1]), np.int32) for group, _ in self._groups)
        return tables + reserved_bytes((max_requests + 1,), np.int32)

    def stage(self, rows: Int, bounds: Int, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> StagedAttention:
        """What gives `DraftBatch.attend` once the positions [n] of the newest tokens are known on the device.

        Args:
            rows: [n]; bounds: [n] what their positions are at most.
            upload: takes an array to the device; it is there when the result is called.
        """
        inside = np.minimum(bounds + self._offsets, self._max_model_len - 1)
        seq_lens, longest = (inside + 1).astype(np.int32), int(inside.max(initial=0)) + 1
        starts = np.arange(len(rows) + 1, dtype=np.int32)
        starts_device = upload(starts)
        tables = [upload(group.table[:, : -(-longest // size)][rows]) for group, size in self._groups]
        return StagedAttention(self, starts, starts_device, seq_lens, tables)

    def places(self, positions: torch.Tensor, tables: Sequence[torch.Tensor]) -> Places:
        """Where tokens at `positions` [n] and behind them go, by block tables [n, width].

        A place that the request has no block for, or behind the model's longest sequence, is not stored. A negative
        position is no request's: nothing is stored or read.
        """
        live = positions >= 0
        places = positions + self._steps  # [num_tokens, n]
        where = places.clamp(min=0, max=self._max_model_len - 1)
        slots = []
        for table, (_, size) in zip(tables, self._groups, strict=True):
            blocks = table.gather(1, (where // size).T).T
            found = blocks.long() * size + where % size
            found = found.masked_fill((blocks == NULL_BLOCK) | (places != where) | ~live, -1)
            slots.append(found.contiguous())  # kernels read an offset's slots as a row
        return Places((where + 1).int() * live, where, slots)

    def captured(self, size: int) -> CapturedAttention:
        """For graphs that hold the steps of a whole proposal for `size` requests."""
        starts = np.arange(size + 1, dtype=np.int32)
        starts_device = self._upload(starts)
        width = [group.table.shape[1] for group, _ in self._groups]
        tables = [torch.zeros(size, columns, dtype=torch.int32, device=self._device) for columns in width]
        positions = torch.full((size,), -1, device=self._device)
        longest = np.full((len(self._offsets), size), self._max_model_len, np.int32)
        places = self.places(positions, tables)
        batches = [self._batches(starts, starts_device, longest, places, tables, i) for i in range(len(longest))]
        plans = [self._router.plans(batch) for batch in batches]
        return CapturedAttention(self, self._router, positions, tables, places, batches, plans)

    def attend(
        self,
        starts: npt.NDArray[np.int32],
        starts_device: torch.Tensor,
        seq_lens: npt.NDArray[np.int32],
        places: Places,
        tables: Sequence[torch.Tensor],
    ) -> Callable[[int], Attend]:
        """See `DraftBatch.attend`; an offset is planned when it is asked for.

        Args:
            starts: [n + 1], and on the device.
            seq_lens: [num_tokens, n] by offset.
            tables: [n, width] of each cache group.
        """
        return lambda offset: self._router.plan(self._batches(starts, starts_device, seq_lens, places, tables, offset))

    def _batches(
        self,
        starts: npt.NDArray[np.int32],
        starts_device: torch.Tensor,
        seq_lens: npt.NDArray[np.int32],
        places: Places,
        tables: Sequence[torch.Tensor],
        offset: int,
    ) -> list[AttentionBatch]:
        count = len(starts) - 1
        return [
            AttentionBatch(
                num_requests=count,
                num_tokens=count,
                max_query_len=1,
                max_seq_len=int(seq_lens[offset].max()),
                query_start_loc=starts_device,
                seq_lens=places.seq_lens[offset],
                block_table=table,
                slot_mapping=slots[offset],
                positions=places.positions[offset],
                query_start_loc_cpu=starts,
                seq_lens_cpu=seq_lens[offset],
                num_decodes=count,
            )
            for table, slots in zip(tables, places.slots, strict=True)
        ]

    def _upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
