"""`DraftAttention.fill` in Triton: one program for each request instead of some twenty launches."""

# mypy: ignore-errors

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from slotline.core.kv_cache.block_pool import NULL_BLOCK

if TYPE_CHECKING:
    from slotline.registry.contracts import DraftPlaces as Places


@triton.jit
def _slot(table, place, where, live, size, null: tl.constexpr, keep):
    """Return the slot of each place, -1 if it is not stored. `where` are the places clamped to the longest sequence."""
    block = tl.load(table + where // size, mask=keep, other=null).to(tl.int64)
    return tl.where(live & (block != null) & (place == where), block * size + where % size, -1)


@triton.jit(do_not_specialize=["n", "table_row", "longest"])
def _fill_places(
    positions,
    table,
    seq_lens,
    places,
    slots,
    lead_places,
    lead_slots,
    n,
    table_row,
    longest,
    size: tl.constexpr,
    drafts: tl.constexpr,
    padded: tl.constexpr,
    null: tl.constexpr,
    leads: tl.constexpr,
):
    """Write seq_lens, places and slots [drafts, n], lead_places and lead_slots [2 * n].

    See `draft_attention.Places`.
    """
    request, at = tl.program_id(0), tl.arange(0, padded)
    newest = tl.load(positions + request)
    live, keep = newest >= 0, at < drafts
    table += request.to(tl.int64) * table_row
    place = newest + at
    where = tl.minimum(tl.maximum(place, 0), longest - 1)
    tl.store(seq_lens + at * n + request, tl.where(live, where + 1, 0).to(tl.int32), mask=keep)
    tl.store(places + at * n + request, where, mask=keep)
    tl.store(slots + at * n + request, _slot(table, place, where, live, size, null, keep), mask=keep)
    if leads:
        two = tl.arange(0, 2)
        place = newest - 1 + two
        where = tl.minimum(tl.maximum(place, 0), longest - 1)
        tl.store(lead_places + 2 * request + two, where)
        tl.store(lead_slots + 2 * request + two, _slot(table, place, where, live, size, null, two < 2))


def fill_places(
    found: Places,
    slots: torch.Tensor,
    lead_slots: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    size: int,
    longest: int,
) -> None:
    """Fill a cache group's `slots` and `lead_slots`, and the arrays of `found` that all groups share.

    Args:
        found: positions of the drafts.
        slots, lead_slots: of the cache group.
        positions: [n] int64.
        table: [n, width] int32, whose rows may be parts of wider ones.
        size: tokens of a block.
        longest: tokens of the longest sequence.
    """
    drafts, n = slots.shape
    if n:
        _fill_places[(n,)](
            positions,
            table,
            found.seq_lens,
            found.positions,
            slots,
            found.lead_positions,
            lead_slots,
            n,
            table.stride(0),
            longest,
            size=size,
            drafts=drafts,
            padded=triton.next_power_of_2(drafts),
            null=NULL_BLOCK,
            leads=lead_slots.numel() > 0,
            num_warps=1,
        )
