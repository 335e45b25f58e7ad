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
    """Pages that some requests read.

    `indptr` is [n + 1]. Per request there are the tokens in its last page, the skipped pages before its window, and the
    keys in the others, all int32.
    """

    indptr: Int
    last_page_len: Int
    skipped: Int
    lens: Int


def pages_of(batch: AttentionBatch, first: int, end: int, page: int, window: int | None) -> Pages:
    """Return the pages of requests `first` .. `end` after the common prefix.

    Pages completely before every query's window are skipped. They may have been freed, and FlashInfer multiplies masked
    values by zero, garbage included.
    """
    lens = batch.seq_lens_cpu[first:end]
    skipped = np.minimum(lens, batch.common_prefix_len) // page  # a padded request has no length
    if window is not None:
        query_lens = np.diff(batch.query_start_loc_cpu[first : end + 1])
        skipped = np.maximum(lens - query_lens - window + 1, 0) // page
    return _listed(lens - skipped * page, skipped, page)


def prefix_pages(length: int, page: int) -> Pages:
    """Return the pages of a common prefix, in the form of a single request."""
    return _listed(np.array([length], np.int32), np.zeros(1, np.int32), page)


def _listed(lens: Int, skipped: Int, page: int) -> Pages:
    counts = -(-lens // page)
    indptr = np.zeros(len(lens) + 1, np.int32)
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


@triton.jit  # type: ignore[untyped-decorator]
def join(out, lse, other, other_lse, num_heads, size, out_token, out_head, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Merge attention over two parts of the keys, by token and head, the second into the first, with LSE in base 2."""
    row = tl.program_id(0).to(tl.int64)
    first, second = tl.load(lse + row), tl.load(other_lse + row)
    most = tl.maximum(first, second)
    share, other_share = tl.exp2(first - most), tl.exp2(second - most)
    whole = share + other_share
    place = tl.arange(0, width)
    to = out + row // num_heads * out_token + row % num_heads * out_head + place
    added = tl.load(other + row * size + place, mask=place < size).to(tl.float32)
    value = tl.where(share > 0, tl.load(to, mask=place < size).to(tl.float32) * share, 0.0)  # no key, no number
    value = (value + added * other_share) / whole
    tl.store(to, value.to(out.dtype.element_ty), mask=place < size)
    tl.store(lse + row, most + tl.log2(whole))
