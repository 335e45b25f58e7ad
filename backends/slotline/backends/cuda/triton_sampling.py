"""Sampling on a GPU in two launches and one pass over the logits, without a sort and without waiting for the device.

The first kernel reads every logit once and keeps, for each group of 32 neighbouring tokens, the largest one and the
group's softmax mass. The second, one program for each row, looks again only at groups that can hold a kept token:

* top-k: at least k logits reach the k-th largest group maximum, so no kept one lies in a group whose maximum is below
  it. k groups hold them all, however large the vocabulary.
* top-p: the groups with the 128 largest maxima, if their logits above the smallest of these hold the share. If not, all
  groups with a logit above one below which the whole vocabulary would hold less than the share outside of the nucleus.
* the floor: the groups whose maximum reaches the floor.

Among those the threshold is found by bisection over the float32 numbers themselves, 32 steps at most, so that equal
logits stay or go together. The draw walks the groups' kept masses in token order, then the tokens of one group.

A row of which more than 512 groups would be looked at is left to two more kernels, which end at once where there is
none. The second kernel only bounds the end of its nucleus between two numbers, by a sample of the groups. The third,
many programs for each row, sums up the logits above for each tile of 128 groups and lists those between. The fourth
bisects over the lists, which a row holds in registers, picks a tile by the tiles' masses, and reads that one. An
estimate that was wrong, or a list that is too long, costs time: bisection goes over all groups then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from slotline.backends.cuda import triton_kernels
from slotline.backends.cuda.triton_logits_ops import Kept, keeping
from slotline.kernels.triton_launcher import Launch, Launcher, cdiv, next_power_of_2
from slotline.registry.contracts.device import SampledRows

GROUP = 32
MOST_GROUPS = 8192
"""Groups of a row that one program holds. Above 262,144 tokens the groups grow."""
TILE = 128
"""Groups that are read at a time."""
DEEP = int(triton_kernels.DEEP.value)
"""Tiles that a row looks at within one program."""
ROOM = 1024
"""Logits near the end of a nucleus that a tile may list."""
LISTED = 256
"""How many of those a row's program holds of each tile. Longer lists are read again and again."""
PARTS = 3168
"""Programs that sum up the tiles of rows, 24 on each of 132 multiprocessors."""
PART_BLOCK = 8
"""Groups that such a program, of one warp, reads at a time."""
LEAST_WIDTH = 512
STATS_WARPS = 4
ROW_WARPS = 16
"""The most warps. There are 8 for 4,096 groups."""
ROW_REGISTERS: dict[str, int] = {"maxnreg": 128} if torch.version.cuda else {}
"""Limit that lets two rows of 8 warps fit on a multiprocessor.

More registers would save 48 bytes of spills and cost half of the rows.
"""

group_stats, draw_rows = Launcher(triton_kernels.group_stats), Launcher(triton_kernels.draw_rows)
sum_parts, draw_deep_rows = Launcher(triton_kernels.sum_parts), Launcher(triton_kernels.draw_deep_rows)


class Scratch(NamedTuple):
    """Device buffers for the draws of up to n rows: the groups' numbers, and the results of `sample_triton`."""

    maxima: torch.Tensor  # [n, num_groups] float32, and the sums
    sums: torch.Tensor
    chosen: torch.Tensor  # [n, num_groups] int32
    plans: torch.Tensor  # [n, 16] int32
    left: torch.Tensor  # [1 + n] int32
    near: torch.Tensor  # [n, num_tiles, ROOM] float32, empty if no row can be deep, as are the next two
    counts: torch.Tensor  # [n, num_tiles] int32
    masses: torch.Tensor  # [n, num_tiles] float64
    tokens: torch.Tensor  # [n] int64
    least: torch.Tensor  # [n] float32
    holds_nan: torch.Tensor  # [n] bool

    @classmethod
    def of(cls, n: int, vocab_size: int, device: torch.device | str) -> Scratch:
        """Allocate the buffers for logits [n, vocab_size]."""
        num_groups = cdiv(vocab_size, _group(vocab_size))
        num_tiles = cdiv(num_groups, TILE) if num_groups > DEEP * TILE else 0
        return cls(
            torch.empty(n, num_groups, dtype=torch.float32, device=device),
            torch.empty(n, num_groups, dtype=torch.float32, device=device),
            torch.empty(n, num_groups, dtype=torch.int32, device=device),
            torch.empty(n, 16, dtype=torch.int32, device=device),
            torch.empty(1 + n, dtype=torch.int32, device=device),
            torch.empty(n, num_tiles, ROOM, dtype=torch.float32, device=device),
            torch.empty(n, num_tiles, dtype=torch.int32, device=device),
            torch.empty(n, num_tiles, dtype=torch.float64, device=device),
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


def sample_into(logits: torch.Tensor, params: torch.Tensor, *, limited: bool = True) -> Scratch:
    """Draw into new scratch, which also marks the rows that hold NaN. `limited` is as in `launches`."""
    scratch = Scratch.of(len(logits), logits.shape[1], logits.device)
    for launch in launches(logits, params, scratch, limited=limited):
        launch()
    return scratch


def launches(
    logits: torch.Tensor, params: torch.Tensor, scratch: Scratch, kept: Kept | None = None, *, limited: bool = True
) -> tuple[Launch, ...]:
    """Return the launches that draw the tokens of logits [n, vocab_size] into scratch of n rows or more.

    `kept` are further places that they are written to. If not `limited`, no row has a top-k, a top-p or a floor.
    """
    n, vocab_size = logits.shape
    if n == 0:
        return ()
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    group = _group(vocab_size)
    num_groups = cdiv(vocab_size, group)
    num_tiles = cdiv(num_groups, TILE)
    width = max(LEAST_WIDTH, next_power_of_2(num_groups))
    maxima, sums, chosen, plans, left, near, counts, masses, tokens, least, holds_nan = scratch
    stride = logits.stride(0)
    drawn = (tokens, least, holds_nan, *keeping(kept, tokens))
    of_a_row = {"num_warps": max(STATS_WARPS, min(ROW_WARPS, width // 512)), **ROW_REGISTERS}
    found = [
        Launch(
            group_stats,
            (n * num_tiles,),
            (logits, stride, params, maxima, sums, left, vocab_size, num_groups, num_tiles, group, TILE),
            {"num_warps": STATS_WARPS},
        ),
        Launch(
            draw_rows,
            (n,),
            (
                *(logits, stride, params, maxima, sums, chosen, plans, left, *drawn),
                *(vocab_size, num_groups, group, TILE, width),
            ),
            of_a_row,
        ),
    ]
    if limited and num_groups > DEEP * TILE:
        found += [
            Launch(
                sum_parts,
                (min(PARTS, n * num_tiles),),
                (
                    *(logits, stride, params, plans, left, near, counts, masses),
                    *(vocab_size, num_tiles, group, TILE, ROOM, min(TILE, PART_BLOCK)),
                ),
                {"num_warps": 1},
            ),
            Launch(
                draw_deep_rows,
                (n,),
                (
                    *(logits, stride, params, sums, chosen, plans, near, counts, masses, *drawn),
                    *(
                        vocab_size,
                        num_groups,
                        num_tiles,
                        group,
                        TILE,
                        width,
                        ROOM,
                        min(ROOM, LISTED),
                        next_power_of_2(num_tiles),
                    ),
                ),
                of_a_row,
            ),
        ]
    return tuple(found)


def are_limited(rows: SampledRows) -> bool:
    """Return True if a row has a top-k, a top-p or a floor."""
    return bool((rows.top_p < 1).any() or rows.top_k.any() or (rows.log_floor > -np.inf).any())


def _group(vocab_size: int) -> int:
    """Return the number of tokens of a group."""
    return max(GROUP, next_power_of_2(cdiv(vocab_size, MOST_GROUPS)))
