"""Lists of pages in FlashInfer's form: one after the other, with the place where each request's begin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from slotline.registry.contracts.attention import AttentionBatch

Int = npt.NDArray[np.int32]


class Pages(NamedTuple):
    """Which pages some requests read: `indptr` [n + 1], and per request the tokens in its last page, the pages
    before its window that are left out, and the keys in the others; int32.
    """

    indptr: Int
    last_page_len: Int
    skipped: Int
    lens: Int


def pages_of(batch: AttentionBatch, first: int, end: int, page: int, window: int | None) -> Pages:
    """The pages of requests `first` .. `end`; those that lie wholly before every query's window are left out, since
    they may have been freed, and FlashInfer multiplies masked values by zero, garbage too.
    """
    lens = batch.seq_lens_cpu[first:end]
    skipped = np.zeros_like(lens)
    if window is not None:
        query_lens = np.diff(batch.query_start_loc_cpu[first : end + 1])
        skipped = np.maximum(lens - query_lens - window + 1, 0) // page
    lens = lens - skipped * page
    counts = -(-lens // page)
    indptr = np.zeros(end - first + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return Pages(indptr, np.where(counts > 0, lens - (counts - 1) * page, 0).astype(np.int32), skipped, lens)


@triton.jit  # type: ignore[untyped-decorator]
def line_up(table, row_stride, indptr, skipped, indices, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy each request's pages from its row of the block table, after those skipped, to its place in `indices`."""
    row = tl.program_id(0)
    start = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - start
    source = table + row.to(tl.int64) * row_stride + tl.load(skipped + row)
    for at in range(0, count, block):
        offsets = at + tl.arange(0, block)
        here = offsets < count
        tl.store(indices + start + offsets, tl.load(source + offsets, mask=here), mask=here)
