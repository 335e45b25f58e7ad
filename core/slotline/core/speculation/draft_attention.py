"""Attention of a drafter's own layers, which lie in the model's cache groups and have its requests' blocks.

What a step computed is attended over under the step's own plans. Behind it a drafter goes on by itself, one token of
each request at a time; keys and values of those are guesses, overwritten when the model has computed the places. A
drafter that catches up begins with two tokens of each request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.batch.attend import Attend
from slotline.core.device.torch_ops import TorchOps
from slotline.core.device.transfer_buffer import reserved_bytes
from slotline.core.kv_cache.block_pool import NULL_BLOCK
from slotline.core.kv_cache.kv_cache_manager import CacheGroup
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher, StepPlans
from slotline.registry.contracts import AttentionBatch, AttentionLayer, DeviceOps, DraftPlaces

Int = npt.NDArray[np.int64]
WIDTHS = 16
"""Block tables are so many columns wide or a multiple, if they have them: kernels are compiled for few widths."""


class Places(NamedTuple):
    """Where drafts go, on the device, by offset behind the newest tokens.

    `seq_lens` [num_tokens, n] int32, `positions` [num_tokens, n] int64, `slots` [num_tokens, n] int64 by cache group.
    Where the first step takes the token in front of the newest, too, its own are `lead_positions` [2 * n] and
    `lead_slots` [2 * n] by cache group; else these are empty.
    """

    seq_lens: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]
    lead_positions: torch.Tensor
    lead_slots: list[torch.Tensor]


class Starts(NamedTuple):
    """Where the tokens of each of n requests begin, [n + 1] int32 on the host and on the device, by tokens of each."""

    one: npt.NDArray[np.int32]
    one_device: torch.Tensor
    two: npt.NDArray[np.int32]
    two_device: torch.Tensor


@frozen(eq=False)
class StagedAttention:
    """Attention of a proposal whose positions are known on the device alone: `tables` [n, width] by cache group."""

    _attention: DraftAttention
    _starts: Starts
    _seq_lens: npt.NDArray[np.int32]
    tables: list[torch.Tensor]

    def __call__(self, positions: torch.Tensor) -> Callable[[int], Attend]:
        """See `DraftBatch.attend`, for the positions [n] of the newest tokens."""
        places = self._attention.places(positions, self.tables)
        return self._attention.attend(self._starts, self._seq_lens, places, self.tables)


@frozen(eq=False)
class CapturedAttention:
    """The same at fixed addresses, every step planned for the longest sequences.

    Attributes:
        positions: [size] int64, of the newest tokens; negative for a padded request.
        places: behind them, once they were refreshed.
    """

    _attention: DraftAttention
    _router: AttentionDispatcher
    positions: torch.Tensor
    places: Places
    _tables: list[torch.Tensor]
    _batches: list[list[AttentionBatch]]  # what the plans were made of, which captured kernels read
    _plans: list[StepPlans]

    def fill(self, staged: StagedAttention) -> None:
        """Copy block tables, before a replay."""
        for own, table in zip(self._tables, staged.tables, strict=True):
            own[: table.shape[0], : table.shape[1]].copy_(table)

    def refresh(self) -> None:
        """Find the places behind `positions`, inside the graph."""
        self._attention.fill(self.places, self.positions, self._tables)

    def attend(self, offset: int) -> Attend:
        """See `DraftBatch.attend`."""
        return self._router.under(self._plans[offset])


class DraftAttention:
    """Plans a drafter's steps.

    Args:
        router: of all layers; `layers` the drafter's own.
        groups: all cache groups, in order; `kernel_block_sizes` theirs.
        num_tokens: draft tokens.
        leads: whether the first step takes the token in front of the newest, too.
        device: torch device string.
        ops: operations of the device.
    """

    def __init__(
        self,
        router: AttentionDispatcher,
        layers: Sequence[AttentionLayer],
        groups: Sequence[CacheGroup],
        kernel_block_sizes: Sequence[int],
        *,
        max_model_len: int,
        num_tokens: int,
        leads: bool,
        device: str,
        ops: DeviceOps | None = None,
    ) -> None:
        self._router, read = router.part(layers)
        self._groups = [(groups[index], kernel_block_sizes[index]) for index in read]
        self._max_model_len = max_model_len
        self._offsets = np.arange(num_tokens)[:, None]
        self._leads = leads
        self._device = device
        self._find_places = (ops or TorchOps()).draft_places

    def reserved_bytes(self, max_requests: int) -> int:
        """What `stage` uploads at most."""
        tables = sum(reserved_bytes((max_requests, group.table.shape[1]), np.int32) for group, _ in self._groups)
        return tables + 2 * reserved_bytes((max_requests + 1,), np.int32)

    def has_room(self, rows: Int, bounds: Int) -> npt.NDArray[np.bool_]:
        """Whether each of `rows` [n] has blocks for all that a proposal behind positions up to `bounds` [n] stores."""
        last = np.minimum(bounds + self._offsets[-1], self._max_model_len - 1)
        there = [group.table[rows, last // size] != NULL_BLOCK for group, size in self._groups]
        found: npt.NDArray[np.bool_] = np.logical_and.reduce(there)
        return found

    def stage(self, rows: Int, bounds: Int, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> StagedAttention:
        """What gives `DraftBatch.attend` once the positions [n] of the newest tokens are known on the device.

        Args:
            rows: [n]; bounds: [n] what their positions are at most.
            upload: takes an array to the device; it is there when the result is called.
        """
        inside = np.minimum(bounds + self._offsets, self._max_model_len - 1)
        seq_lens, longest = (inside + 1).astype(np.int32), int(inside.max(initial=0)) + 1
        starts = self._starts(len(rows), upload)
        widths = [-(-longest // (size * WIDTHS)) * WIDTHS for _, size in self._groups]
        tables = [upload(group.table[:, :width][rows]) for (group, _), width in zip(self._groups, widths, strict=True)]
        return StagedAttention(self, starts, seq_lens, tables)

    def places(self, positions: torch.Tensor, tables: Sequence[torch.Tensor]) -> Places:
        """Where tokens at `positions` [n] and behind them go, by block tables [n, width].

        A place that the request has no block for, or behind the model's longest sequence, is not stored. A negative
        position is no request's: nothing is stored or read.
        """
        shape, leading = (len(self._offsets), len(positions)), 2 * len(positions) * self._leads

        def made(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=self._device)

        slots, lead_slots = [made(*shape) for _ in tables], [made(leading) for _ in tables]
        found = Places(made(*shape, dtype=torch.int32), made(*shape), slots, made(leading), lead_slots)
        self.fill(found, positions, tables)
        return found

    def fill(self, found: Places, positions: torch.Tensor, tables: Sequence[torch.Tensor]) -> None:
        """`places`, written into `found`."""
        shared = DraftPlaces(found.seq_lens, found.positions, found.lead_positions)
        for table, slots, lead_slots, (_, size) in zip(
            tables, found.slots, found.lead_slots, self._groups, strict=True
        ):
            self._find_places(shared, slots, lead_slots, positions, table, size, self._max_model_len)

    def captured(self, size: int) -> CapturedAttention:
        """For graphs that hold the steps of a whole proposal for `size` requests."""
        starts = self._starts(size, self._upload)
        width = [group.table.shape[1] for group, _ in self._groups]
        tables = [torch.zeros(size, columns, dtype=torch.int32, device=self._device) for columns in width]
        positions = torch.full((size,), -1, device=self._device)
        longest = np.full((len(self._offsets), size), self._max_model_len, np.int32)
        places = self.places(positions, tables)
        batches = [self._batches(starts, longest, places, tables, i) for i in range(len(longest))]
        plans = [self._router.plans(batch) for batch in batches]
        return CapturedAttention(self, self._router, positions, places, tables, batches, plans)

    def attend(
        self,
        starts: Starts,
        seq_lens: npt.NDArray[np.int32],
        places: Places,
        tables: Sequence[torch.Tensor],
    ) -> Callable[[int], Attend]:
        """See `DraftBatch.attend`; an offset is planned when it is asked for.

        Args:
            seq_lens: [num_tokens, n] by offset.
            tables: [n, width] of each cache group.
        """
        return lambda offset: self._router.plan(self._batches(starts, seq_lens, places, tables, offset))

    def _batches(
        self,
        starts: Starts,
        seq_lens: npt.NDArray[np.int32],
        places: Places,
        tables: Sequence[torch.Tensor],
        offset: int,
    ) -> list[AttentionBatch]:
        count, two = len(starts.one) - 1, self._leads and offset == 0
        return [
            AttentionBatch(
                num_requests=count,
                num_tokens=2 * count if two else count,
                max_query_len=2 if two else 1,
                max_seq_len=int(seq_lens[offset].max()),
                query_start_loc=starts.two_device if two else starts.one_device,
                seq_lens=places.seq_lens[offset],
                block_table=table,
                slot_mapping=lead_slots if two else slots[offset],
                positions=places.lead_positions if two else places.positions[offset],
                query_start_loc_cpu=starts.two if two else starts.one,
                seq_lens_cpu=seq_lens[offset],
                num_decodes=0 if two else count,
            )
            for table, slots, lead_slots in zip(tables, places.slots, places.lead_slots, strict=True)
        ]

    def _starts(self, count: int, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> Starts:
        one = np.arange(count + 1, dtype=np.int32)
        return Starts(one, upload(one), 2 * one, upload(2 * one))

    def _upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
