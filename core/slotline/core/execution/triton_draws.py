"""Where drawn tokens go, in Triton: the table of last tokens and the host, in one launch."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slotline.core.launching import Launcher, cdiv

BLOCK = 128


@triton.jit(do_not_specialize=["count"])
def _keep_tokens(tokens, stand_ins, table, host, count, block: tl.constexpr):
    """Grid (parts,): token i to `table[stand_ins[i]]` and to `host[i]`."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < count
    drawn = tl.load(tokens + at, there)
    tl.store(table + tl.load(stand_ins + at, there, other=0), drawn, there)
    tl.store(host + at, drawn, there)


_launch = Launcher(_keep_tokens)


def keep_tokens(tokens: torch.Tensor, stand_ins: torch.Tensor, table: torch.Tensor, host: torch.Tensor) -> None:
    """Keep `tokens` [n] int64 at the places `stand_ins` [n] int64 of a table, and at the front of pinned memory."""
    _launch((cdiv(len(tokens), BLOCK),), tokens, stand_ins, table, host, len(tokens), BLOCK, num_warps=BLOCK // 32)
