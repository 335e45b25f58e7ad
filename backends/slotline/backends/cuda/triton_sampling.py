"""Sampling on a GPU in two launches and one pass over the logits, without a sort and without waiting for the device.

The first kernel reads every logit once and keeps, for each group of 32 neighbouring tokens, the largest one and the
group's softmax mass. The second, one program for each row, looks again only at groups that can hold a kept token:

* top-k: at least k logits reach the k-th largest group maximum, so no kept one lies in a group whose maximum is below
  it. k groups hold them all, however large the vocabulary.
* top-p: the groups with the 128 largest maxima, if their logits above the smallest of these hold the share. If not, all
  groups with a logit above one below which the whole vocabulary would hold less than the share outside of the nucleus.
* the floor: the groups whose maximum reaches the floor.

Among those the threshold is found by bisection over the float32 numbers themselves, 32 steps at most, so that equal
logits stay or go together. If a nucleus is sought among most of a row, a sample of the groups bounds its end between
two numbers. One pass sums up the logits above and lists those between, and bisection goes over that list. An estimate
that was wrong, or a list that is too long, costs time: bisection goes over all groups then. The draw walks the groups'
kept masses in token order, then the tokens of one group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slotline.backends.cuda import triton_kernels
from slotline.backends.cuda.triton_logits_ops import Kept, keeping
from slotline.kernels.triton_launcher import Launch, Launcher, cdiv, next_power_of_2

GROUP = 32
MOST_GROUPS = 8192
"""Groups of a row that one program holds. Above 262,144 tokens the groups grow."""
TILE = 128
"""Groups that are read at a time."""
ROOM = 8192
"""Logits near the end of a nucleus that a row may list."""
LEAST_WIDTH = 512
STATS_WARPS = 4
ROW_WARPS = 16
"""The most warps. There are 8 for 4,096 groups."""
ROW_REGISTERS: dict[str, int] = {"maxnreg": 128} if torch.version.cuda else {}
"""Limit that lets two rows of 8 warps fit on a multiprocessor.

More registers would save 48 bytes of spills and cost half of the rows.
"""

group_stats, draw_rows = Launcher(triton_kernels.group_stats), Launcher(triton_kernels.draw_rows)


class Scratch(NamedTuple):
    """Device buffers for the draws of up to n rows: the groups' numbers, and the results of `sample_triton`."""

    maxima: torch.Tensor  # [n, num_groups] float32, and the sums
    sums: torch.Tensor
    chosen: torch.Tensor  # [n, num_groups] int32
    near: torch.Tensor  # [n, ROOM] float32
    tokens: torch.Tensor  # [n] int64
    least: torch.Tensor  # [n] float32
    holds_nan: torch.Tensor  # [n] bool

    @classmethod
    def of(cls, n: int, vocab_size: int, device: torch.device | str) -> Scratch:
        """Allocate the buffers for logits [n, vocab_size]."""
        num_groups = cdiv(vocab_size, _group(vocab_size))
        return cls(
            torch.empty(n, num_groups, dtype=torch.float32, device=device),
            torch.empty(n, num_groups, dtype=torch.float32, device=device),
            torch.empty(n, num_groups, dtype=torch.int32, device=device),
            torch.empty(n, ROOM, dtype=torch.float32, device=device),
            torch.empty(n, dtype=torch.int64, device=device),
            torch.empty(n, dtype=torch.float32, device=device),
            torch.empty(n, dtype=torch.bool, device=device),
        )


def sample_triton(logits: torch.Tensor, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [n] int64 from logits [n, vocab_size] float32. Return also the smallest scaled logits [n] kept.

    `params` [n, 8] int32 is `SamplingMetadata.packed` on the same device.
    """
    scratch = sample_into(logits, params)
    return scratch.tokens, scratch.least


def sample_into(logits: torch.Tensor, params: torch.Tensor) -> Scratch:
    """Draw into new scratch, which also marks the rows that hold NaN."""
    scratch = Scratch.of(len(logits), logits.shape[1], logits.device)
    for launch in launches(logits, params, scratch):
        launch()
    return scratch


def launches(
    logits: torch.Tensor, params: torch.Tensor, scratch: Scratch, kept: Kept | None = None
) -> tuple[Launch, ...]:
    """Return the launches that draw the tokens of logits [n, vocab_size] into scratch of n rows or more.

    `kept` are further places that they are written to.
    """
    n, vocab_size = logits.shape
    if n == 0:
        return ()
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    group = _group(vocab_size)
    num_groups = cdiv(vocab_size, group)
    num_tiles = cdiv(num_groups, TILE)
    width = max(LEAST_WIDTH, next_power_of_2(num_groups))
    maxima, sums, chosen, near, tokens, least, holds_nan = scratch
    stride = logits.stride(0)
    return (
        Launch(
            group_stats,
            (n * num_tiles,),
            (logits, stride, params, maxima, sums, vocab_size, num_groups, num_tiles, group, TILE),
            {"num_warps": STATS_WARPS},
        ),
        Launch(
            draw_rows,
            (n,),
            (
                *(logits, stride, params, maxima, sums, chosen, near, tokens, least, holds_nan),
                *keeping(kept, tokens),
                *(vocab_size, num_groups, group, TILE, width, ROOM),
            ),
            {"num_warps": max(STATS_WARPS, min(ROW_WARPS, width // 512)), **ROW_REGISTERS},
        ),
    )


def _group(vocab_size: int) -> int:
    """Return the number of tokens of a group."""
    return max(GROUP, next_power_of_2(cdiv(vocab_size, MOST_GROUPS)))
