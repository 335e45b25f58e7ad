"""Triton kernels for rows of block tables. Each program copies a part of a row."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slotline.kernels.triton_launcher import Launcher, cdiv

BLOCK, WARPS = 1024, 4


@triton.jit(do_not_specialize=["width"])
def _copy_rows(source, rows, out, width, taken: tl.constexpr, block: tl.constexpr):
    """Copy row `rows[i]` of `source` to row i of `out` if `taken`, else row i to row `rows[i]`. Grid (n, parts)."""
    here = tl.program_id(0).to(tl.int64)
    there = tl.load(rows + here)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    read, written = (there, here) if taken else (here, there)
    held = columns < width
    tl.store(out + written * width + columns, tl.load(source + read * width + columns, mask=held, other=0), held)


_launch = Launcher(_copy_rows)


def take_rows(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the rows `rows` [n] int64 of `table` [m, width] int32 to the first rows of `out` [>= n, width] int32."""
    if len(rows):
        width = table.shape[1]
        _launch((len(rows), cdiv(width, BLOCK)), table, rows, out, width, True, BLOCK, num_warps=WARPS)


def put_rows(table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` [n, width] int32 to the rows `rows` [n] int64, which are distinct, of `table`."""
    if len(rows):
        width = table.shape[1]
        _launch((len(rows), cdiv(width, BLOCK)), values, rows, table, width, False, BLOCK, num_warps=WARPS)
