"""`argmax` in Triton: the best of each part of a row, and the best of those."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slotline.backends.cuda.triton_kernels import hand_over
from slotline.backends.cuda.triton_logits_ops import Kept, keeping
from slotline.kernels.triton_launcher import Launch, Launcher

MANY_ROWS = 32
PARTS, FEW_PARTS = 64, 8
"""Parts of a row, and parts if there are more than `MANY_ROWS` rows."""
BLOCK, WARPS = 2048, 4


@triton.jit(do_not_specialize=["size"])
def _best_of_parts(logits, row_stride, found, size, block: tl.constexpr):
    """Find the largest entry of each part, and its first place: `found` [rows, 2, parts], the places as int32.

    The grid is (rows, parts).
    """
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    each = tl.cdiv(tl.cdiv(size, parts), block) * block  # aligns each part for wide loads
    start = part * each
    end = tl.minimum(start + each, size)
    best = tl.full([block], -float("inf"), tl.float32)
    place = start + tl.zeros([block], tl.int32)  # a part without an entry ranks last
    for first in tl.range(start, end, block):
        at = first + tl.arange(0, block)
        values = tl.load(logits + row * row_stride + at, mask=at < end, other=-float("inf")).to(tl.float32)
        values = tl.where(values != values, float("inf"), values)
        better = values > best
        best, place = tl.where(better, values, best), tl.where(better, at, place)
    largest = tl.max(best)
    found += row * 2 * parts + part
    tl.store(found, largest)
    tl.store(found + parts, tl.min(tl.where(best == largest, place, size)).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["kept"])
def _best_part(logits, row_stride, found, out, stand_ins, table, host, kept, parts: tl.constexpr):
    """Write the place of the first of the largest entries, handed over as tokens are. The grid is (rows,)."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, parts)
    found += row * 2 * parts + part
    best = tl.load(found)
    place = tl.load(found + parts).to(tl.int32, bitcast=True)
    token = tl.min(tl.where(best == tl.max(best), place, 0x7FFFFFFF)).to(tl.int64)
    value = tl.load(logits + row * row_stride + token)
    hand_over(token, value != value, row, out, stand_ins, table, host, kept)


best_of_parts, best_part = Launcher(_best_of_parts), Launcher(_best_part)


def likeliest_triton(logits: torch.Tensor) -> torch.Tensor:
    """See `DeviceOps.argmax`."""
    found = torch.empty(len(logits) * 2 * PARTS, dtype=torch.float32, device=logits.device)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for launch in launches(logits, found, out):
        launch()
    return out


def launches(
    logits: torch.Tensor, found: torch.Tensor, out: torch.Tensor, kept: Kept | None = None
) -> tuple[Launch, ...]:
    """Return the launches that write the likeliest tokens of logits [n, vocab_size] to `out` [n] int64.

    `found` [n * 2 * PARTS] float32 is scratch. `kept` are further places that they are written to.
    """
    n, size = logits.shape
    if n == 0:
        return ()
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parts = PARTS if n <= MANY_ROWS else FEW_PARTS
    return (
        Launch(best_of_parts, (n, parts), (logits, logits.stride(0), found, size, BLOCK), {"num_warps": WARPS}),
        Launch(best_part, (n,), (logits, logits.stride(0), found, out, *keeping(kept, out), parts), {"num_warps": 1}),
    )
