"""`device_verification` in Triton: one program for each row.

Rows of a matrix may or may not start at multiples of 16 bytes, depending on its width. No kernel is recompiled for
that.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slotline.core.batch.placeholder_tokens import PlaceholderTokens


@triton.jit(
    do_not_specialize=["m"],
    do_not_specialize_on_alignment=["sampled", "drafts", "on_device", "rows", "input_ids", "logits_indices"],
)
def _find_stood(
    sampled,
    drafts,
    on_device,
    rows,
    input_ids,
    logits_indices,
    table,
    fallen,
    out,
    m,
    padded: tl.constexpr,
    has_drafts: tl.constexpr,
):
    """Read on_device [>= 4, m] and write out [5, m]. See `find_accepted`. `padded` covers a row's logits."""
    row = tl.program_id(0)
    first, verified = tl.load(on_device + row), tl.load(on_device + m + row)
    known, stand_in = tl.load(on_device + 2 * m + row), tl.load(on_device + 3 * m + row)
    stood = verified * 0
    if has_drafts:
        place = tl.arange(0, padded)
        there = place < verified
        token = tl.load(sampled + first + place, mask=there, other=0)
        draft = tl.load(drafts + first + place, mask=there, other=0)
        stood = tl.minimum(tl.min(tl.where(there & (token != draft), place, padded)), verified)
    last = first + stood
    newest = tl.maximum(tl.load(sampled + last), 0)
    previous = tl.load(table + tl.load(input_ids + tl.load(logits_indices + last)))
    tl.debug_barrier()  # the input may be the placeholder that means another token from now on
    tl.store(table + stand_in, newest)
    tl.store(fallen + tl.load(rows + row), verified - stood)
    tl.store(out + row, last)
    tl.store(out + m + row, newest)
    tl.store(out + 2 * m + row, known + stood)
    tl.store(out + 3 * m + row, verified - stood)
    tl.store(out + 4 * m + row, previous)


@triton.jit(
    do_not_specialize=["vocab_size", "row_stride"],
    do_not_specialize_on_alignment=["found", "newest", "stand_ins"],
)
def _keep_drafts(
    found,
    newest,
    stand_ins,
    table,
    out,
    vocab_size,
    row_stride,
    columns: tl.constexpr,
    drafts: tl.constexpr,
    padded: tl.constexpr,
):
    """Read found [n, columns] from wider rows and write out [n, columns + drafts]. See `keep_drafts`."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    said = tl.load(found + row * row_stride + at, mask=at < columns, other=-1).to(tl.int64)
    kept = tl.where((said >= 0) & (said < vocab_size), said, tl.load(newest + row))
    tl.store(table + tl.load(stand_ins + row) + 1 + at, kept, mask=at < drafts)
    out += row * (columns + drafts) + at
    tl.store(out, said, mask=at < columns)
    tl.store(out + columns, kept, mask=at < drafts)


def find_stood_triton(
    sampled: torch.Tensor,
    drafts: torch.Tensor | None,
    on_device: torch.Tensor,
    rows: torch.Tensor,
    input_ids: torch.Tensor,
    logits_indices: torch.Tensor,
    table: PlaceholderTokens,
) -> torch.Tensor:
    """Find the accepted drafts, [5, m] int64. See `device_verification.find_accepted`."""
    m = on_device.shape[1]
    out = torch.empty(5, m, dtype=torch.int64, device=sampled.device)
    if m:
        padded = triton.next_power_of_2(1 + table.max_spec_tokens)
        _find_stood[(m,)](
            sampled.contiguous(),
            sampled if drafts is None else drafts,
            on_device,
            rows,
            input_ids,
            logits_indices,
            table.tokens,
            table.rejected,
            out,
            m,
            padded=padded,
            has_drafts=drafts is not None,
            num_warps=1,
        )
    return out


def keep_drafts_triton(
    found: torch.Tensor, newest: torch.Tensor, stand_ins: torch.Tensor, table: PlaceholderTokens, vocab_size: int
) -> torch.Tensor:
    """Store the drafts for the next step. See `device_verification.keep_drafts`."""
    (n, columns), drafts = found.shape, table.max_spec_tokens
    found = found if found.stride(1) == 1 else found.contiguous()
    out = torch.empty(n, columns + drafts, dtype=torch.int64, device=found.device)
    if n:
        _keep_drafts[(n,)](
            found,
            newest.contiguous(),
            stand_ins.contiguous(),
            table.tokens,
            out,
            vocab_size,
            found.stride(0),
            columns=columns,
            drafts=drafts,
            padded=triton.next_power_of_2(max(columns, drafts, 1)),
            num_warps=1,
        )
    return out
