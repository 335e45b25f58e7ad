"""Attention of a drafter's own layers, which share the model's cache groups and its requests' blocks.

For the tokens of a step, attention uses the step's own plans. After it a drafter continues by itself, one token of each
request at a time. The keys and values of these tokens are guesses, overwritten once the model has computed the
positions. A drafter that catches up begins with two tokens of each request.
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
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher, DispatchedAttention, StepPlans
from slotline.registry.contracts import AttentionBatch, AttentionLayer, DeviceOps, DraftPlaces, TreeMask
from slotline.registry.errors import ContractError

Int = npt.NDArray[np.int64]
Store = Callable[[AttentionLayer, torch.Tensor, torch.Tensor], None]
WIDTHS = 16
"""Block tables are padded to a multiple of this many columns, if they have them, to compile kernels for few widths."""


class Places(NamedTuple):
    """Positions of drafts on the device, by offset after the newest tokens.

    `seq_lens` is [num_tokens, n] int32, `positions` [num_tokens, n] int64, and `slots` [num_tokens, n] int64 by cache
    group.
    If the first step also takes the token before the newest, its positions are `lead_positions` [2 * n] and its slots
    `lead_slots` [2 * n] by cache group. Otherwise these are empty.
    """

    seq_lens: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]
    lead_positions: torch.Tensor
    lead_slots: list[torch.Tensor]


class Starts(NamedTuple):
    """Start offsets of n requests with one or with two tokens each, [n + 1] int32 on the host and on the device."""

    one: npt.NDArray[np.int32]
    one_device: torch.Tensor
    two: npt.NDArray[np.int32]
    two_device: torch.Tensor


@frozen(eq=False)
class StagedAttention:
    """Attention of a proposal whose positions are known only on the device. `tables` [n, width] is by cache group."""

    _attention: DraftAttention
    _starts: Starts
    _seq_lens: npt.NDArray[np.int32]
    tables: list[torch.Tensor]

    def __call__(self, positions: torch.Tensor) -> ProposalAttention:
        """Plan attention for the positions [n] of the newest tokens. See `DraftBatch.attend`."""
        places = self._attention.places(positions, self.tables)
        return ProposalAttention(self._attention, self._starts, self._seq_lens, places, self.tables)


@frozen(eq=False)
class ProposalAttention:
    """Attention of the steps of a proposal. Each is planned when it is called. Calling it is `DraftBatch.attend`."""

    _attention: DraftAttention
    _starts: Starts
    _seq_lens: npt.NDArray[np.int32]
    _places: Places
    _tables: list[torch.Tensor]

    def __call__(self, offset: int) -> Attend:
        """Return attention of one token of each request. See `DraftBatch.attend`."""
        return self._attention.attend(self._starts, self._seq_lens, self._places, self._tables)(offset)

    def tree(self, parents: torch.Tensor, first: int) -> Attend:
        """Return attention of the nodes from `first` on. See `DraftBatch.attend_tree`."""
        end, count = parents.shape[-1], len(self._starts.one) - 1
        sees, depths = _mask(parents)
        num_nodes = np.full(count, end, np.int32)
        on_device = torch.full((count,), end, dtype=torch.int32, device=parents.device) if parents.ndim > 1 else None
        offsets = depths.expand(count, end)[:, first:]
        mask = TreeMask(sees, depths, num_nodes, on_device)
        return self._attention.attend_several(
            self._starts, self._seq_lens, self._places, self._tables, first, end, offsets, tree=mask
        )

    def block(self, num_queries: int, causal: bool = False) -> Attend:
        """Return attention of `num_queries` tokens of each request. See `BlockAttention`."""
        self._attention.check_block(num_queries, causal)
        offsets = torch.arange(num_queries, device=self._places.positions.device)
        return self._attention.attend_several(
            self._starts,
            self._seq_lens,
            self._places,
            self._tables,
            0,
            num_queries,
            offsets.expand(len(self._starts.one) - 1, num_queries),
            ahead=not causal,
        )


@frozen(eq=False)
class CapturedAttention:
    """Draft attention at fixed addresses, planned for the longest sequences in every step.

    Attributes:
        positions: [size] int64, of the newest tokens. Negative for a padded request.
        places: positions after them, as of the last `refresh`.
    """

    _attention: DraftAttention
    _router: AttentionDispatcher
    positions: torch.Tensor
    places: Places
    _tables: list[torch.Tensor]
    _batches: list[list[AttentionBatch]]  # inputs of the plans, which captured kernels read
    _plans: list[StepPlans]

    def fill(self, staged: StagedAttention) -> None:
        """Copy block tables before a replay."""
        for own, table in zip(self._tables, staged.tables, strict=True):
            own[: table.shape[0], : table.shape[1]].copy_(table)

    def refresh(self) -> None:
        """Compute the places after `positions`, inside the graph."""
        self._attention.fill(self.places, self.positions, self._tables)

    def attend(self, offset: int) -> Attend:
        """Return attention for an offset. See `DraftBatch.attend`."""
        return self._router.bind_plans(self._plans[offset])


class DraftAttention:
    """Planner of attention for a drafter's steps.

    Args:
        router: dispatcher of all layers.
        layers: the drafter's own layers.
        groups: all cache groups, in order.
        kernel_block_sizes: kernel block size of each cache group.
        max_model_len: longest sequence, in tokens.
        num_tokens: draft tokens.
        leads: True if the first step also takes the token before the newest.
        blocks: as `DrafterCapabilities.block_attention`. A block may have one token more than drafts.
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
        blocks: str = "none",
        device: str,
        ops: DeviceOps | None = None,
    ) -> None:
        self._router, read = router.part(layers)
        self._groups = [(groups[index], kernel_block_sizes[index]) for index in read]
        self._max_model_len = max_model_len
        self._blocks = blocks
        self._offsets = np.arange(num_tokens + (blocks != "none"))[:, None]
        self._leads = leads
        self._device = device
        self._find_places = (ops or TorchOps()).draft_places

    def reserved_bytes(self, max_requests: int) -> int:
        """Return the most bytes that `stage` uploads."""
        tables = sum(reserved_bytes((max_requests, group.table.shape[1]), np.int32) for group, _ in self._groups)
        return tables + 2 * reserved_bytes((max_requests + 1,), np.int32)

    def check_block(self, num_queries: int, causal: bool) -> None:
        """Raise ContractError for a block that the drafter did not declare, or that is too large."""
        if self._blocks == "none" or (self._blocks == "causal" and not causal):
            raise ContractError(
                f"attend_block was called with causal={causal}, and the drafter declares block_attention = "
                f"{self._blocks!r}",
                fix=f"declare block_attention={'causal' if causal else 'full'!r}",
            )
        if not 1 <= num_queries <= (most := len(self._offsets)):
            raise ContractError(
                f"attend_block was called for {num_queries} queries of a request",
                fix=f"call it for 1 to {most}, one more than drafts",
            )

    def has_room(self, rows: Int, bounds: Int) -> npt.NDArray[np.bool_]:
        """Return a mask of `rows` [n] with blocks for a whole proposal after positions up to `bounds` [n]."""
        last = np.minimum(bounds + self._offsets[-1], self._max_model_len - 1)
        there = [group.table[rows, last // size] != NULL_BLOCK for group, size in self._groups]
        found: npt.NDArray[np.bool_] = np.logical_and.reduce(there)
        return found

    def stage(self, rows: Int, bounds: Int, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> StagedAttention:
        """Upload the inputs of `DraftBatch.attend`, which needs the positions [n] of the newest tokens on the device.

        Args:
            rows: [n], the requests' rows.
            bounds: [n], upper bounds of the positions.
            upload: copies an array to the device, by the time the result is called.
        """
        inside = np.minimum(bounds + self._offsets, self._max_model_len - 1)
        seq_lens, longest = (inside + 1).astype(np.int32), int(inside.max(initial=0)) + 1
        starts = self._starts(len(rows), upload)
        widths = [-(-longest // (size * WIDTHS)) * WIDTHS for _, size in self._groups]
        tables = [upload(group.table[:, :width][rows]) for (group, _), width in zip(self._groups, widths, strict=True)]
        return StagedAttention(self, starts, seq_lens, tables)

    def places(self, positions: torch.Tensor, tables: Sequence[torch.Tensor]) -> Places:
        """Compute the places of tokens at and after `positions` [n], by block tables [n, width].

        Tokens without a block, or beyond the model's longest sequence, are not stored. A negative position belongs to
        no
        request: nothing is stored or read for it.
        """
        shape, leading = (len(self._offsets), len(positions)), 2 * len(positions) * self._leads

        def made(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=self._device)

        slots, lead_slots = [made(*shape) for _ in tables], [made(leading) for _ in tables]
        found = Places(made(*shape, dtype=torch.int32), made(*shape), slots, made(leading), lead_slots)
        self.fill(found, positions, tables)
        return found

    def fill(self, found: Places, positions: torch.Tensor, tables: Sequence[torch.Tensor]) -> None:
        """Write `places` into `found`."""
        shared = DraftPlaces(found.seq_lens, found.positions, found.lead_positions)
        for table, slots, lead_slots, (_, size) in zip(
            tables, found.slots, found.lead_slots, self._groups, strict=True
        ):
            self._find_places(shared, slots, lead_slots, positions, table, size, self._max_model_len)

    def captured(self, size: int) -> CapturedAttention:
        """Return attention for graphs that capture all steps of a proposal for `size` requests."""
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
        """Return the function of `DraftBatch.attend`. Each offset is planned when it is called.

        Args:
            starts: start offsets of the requests.
            seq_lens: [num_tokens, n] by offset.
            places: positions of the drafts.
            tables: [n, width] of each cache group.
        """
        return lambda offset: self._router.plan(self._batches(starts, seq_lens, places, tables, offset))

    def attend_several(
        self,
        starts: Starts,
        seq_lens: npt.NDArray[np.int32],
        places: Places,
        tables: Sequence[torch.Tensor],
        first: int,
        end: int,
        offsets: torch.Tensor,
        tree: TreeMask | None = None,
        *,
        ahead: bool = False,
    ) -> Attend:
        """Return attention of the tokens in the slots `first` to `end` after the known ones, of each request.

        Args:
            starts, seq_lens, places, tables: as for `attend`.
            offsets: [n, end - first] int64 on the device, the tokens' distances from the newest token in a text.
            tree: what the tokens see of each other. None for those before.
            ahead: True if all of them see each other.
        """
        seen = np.tile(np.arange(end - first, dtype=np.int32)[::-1], len(starts.one) - 1) if ahead else None
        seen_device = None if seen is None else torch.from_numpy(seen).to(self._device)
        each, positions = end - first, (places.positions[0][:, None] + offsets).clamp(max=self._max_model_len - 1)
        batches = [
            AttentionBatch(
                num_requests=len(starts.one) - 1,
                num_tokens=each * (len(starts.one) - 1),
                max_query_len=each,
                max_seq_len=int(seq_lens[end - 1].max()),
                query_start_loc=each * starts.one_device,
                seq_lens=places.seq_lens[end - 1],
                block_table=table,
                slot_mapping=slots[first:end].T.reshape(-1),
                positions=positions.reshape(-1),
                query_start_loc_cpu=each * starts.one,
                seq_lens_cpu=seq_lens[end - 1],
                num_decodes=len(starts.one) - 1 if each == 1 else 0,
                tree=tree,
                keys_ahead=seen_device,
                keys_ahead_cpu=seen,
            )
            for table, slots in zip(tables, places.slots, strict=True)
        ]
        return self._router.plan(batches)

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


def stored_by(attend: Attend) -> Store:
    """Return what fills the caches of a step without attention. See `ComputedTokens.store`.

    A backend that writes only inside `forward` is given queries of zeros.
    """
    assert isinstance(attend, DispatchedAttention)
    router = attend.router

    def store(layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        write, _, cache, position = router.routes[layer.index]
        if write is None:
            attend(layer, key.new_zeros(len(key), layer.num_heads, layer.head_size), key, value, None)
        else:
            write(layer, key, value, cache, router.step.plans[position])

    return store


def _mask(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the nodes of trees [..., k] see, [..., k, k] bool, and their depths from 0, [..., k] int64."""
    count = parents.shape[-1]
    nodes = torch.arange(count, device=parents.device)
    sees = ((parents[..., None] == nodes) | (nodes[:, None] == nodes)).float()
    for _ in range(count.bit_length()):  # paths become twice as long
        sees = (sees @ sees).clamp(max=1)
    return sees > 0, sees.sum(-1).long() - 1
