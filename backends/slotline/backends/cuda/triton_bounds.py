"""`rejected_token_correction.subtract_rejected` in Triton."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 128
"""Tokens of a program."""


@triton.jit(do_not_specialize=["requests", "tokens", "table_row"])
def _take_off(
    fallen,
    which,
    owner,
    positions,
    seq_lens,
    accepted,
    table,
    slots,
    requests,
    tokens,
    table_row,
    size: tl.constexpr,
    has_slots: tl.constexpr,
    has_rest: tl.constexpr,
    has_accepted: tl.constexpr,
    block: tl.constexpr,
):
    """Correct a cache group's slots, from positions that are still bounds, and what is not the group's own."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < tokens
    request = tl.load(owner + at, mask=there, other=0)
    position = tl.load(positions + at, mask=there, other=0)
    position -= tl.load(fallen + tl.load(which + request, mask=there, other=0), mask=there, other=0)
    if has_slots:
        slot = tl.load(slots + at, mask=there, other=-1)
        stored = there & (slot >= 0)
        row = table + tl.minimum(request, requests - 1) * table_row
        found = tl.load(row + position // size, mask=stored, other=0).to(tl.int64)
        tl.store(slots + at, found * size + position % size, mask=stored)
    if has_rest:
        tl.store(positions + at, position, mask=there)
        there = at < requests
        fell = tl.load(fallen + tl.load(which + at, mask=there, other=0), mask=there, other=0)
        length = tl.load(seq_lens + at, mask=there, other=0)
        tl.store(seq_lens + at, (length - fell).to(seq_lens.dtype.element_ty), mask=there)
        if has_accepted:
            count = tl.load(accepted + at, mask=there, other=0)
            tl.store(accepted + at, (count - fell).to(accepted.dtype.element_ty), mask=there)


def take_off_triton(
    fallen: torch.Tensor,
    which: torch.Tensor,
    owner: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    accepted: torch.Tensor | None,
    groups: Sequence[tuple[torch.Tensor, torch.Tensor, int]],
) -> None:
    """See `rejected_token_correction.subtract_rejected`.

    Each of `groups` has a block table, slots and the tokens of a block.
    """
    requests, tokens = len(seq_lens), len(positions)
    grid = (triton.cdiv(max(requests, tokens), BLOCK),)
    for index, (table, slots, size) in enumerate(groups or [(which, which, 1)]):
        _take_off[grid](
            fallen,
            which,
            owner,
            positions,
            seq_lens,
            seq_lens if accepted is None else accepted,
            table,
            slots,
            requests,
            tokens,
            table.stride(0),
            size=size,
            has_slots=len(groups) > 0,
            has_rest=index >= len(groups) - 1,
            has_accepted=accepted is not None,
            block=BLOCK,
        )
