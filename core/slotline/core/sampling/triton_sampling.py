"""Sampling on a GPU in two launches and one pass over the logits, without a sort and without waiting for the device.

The first kernel reads every logit once and keeps, for each group of 32 neighbouring tokens, the largest one and the
group's softmax mass. The second, one program for each row, looks again only at groups that can hold a kept token:

* top-k: at least k logits reach the k-th largest group maximum, so no kept one lies in a group whose maximum is below
  it. k groups hold them all, however large the vocabulary.
* top-p: the groups with the 128 largest maxima, if their logits above the smallest of these hold the share. If not, all
  groups with a logit above one below which the whole vocabulary would hold less than what the nucleus leaves out.
* the floor: the groups whose maximum reaches the floor.

Among those the threshold is found by bisection over the float32 numbers themselves, 32 steps at most, so that equal
logits stay or go together. Where a nucleus is sought among most of a row, a sample of the groups says between which two
numbers it ends; one pass sums up what lies above and lists what lies between, and bisection goes over that list. An
estimate that was wrong, or a list that is too long, costs time: bisection goes over all groups then. The draw walks the
groups' kept masses in token order, then the tokens of one group.
"""

from __future__ import annotations

import torch

from slotline.core.launching import Launcher, cdiv, next_power_of_2
from slotline.core.sampling import triton_kernels

GROUP = 32
MOST_GROUPS = 8192
"""Groups of a row that one program holds; above 262,144 tokens the groups grow."""
TILE = 128
"""Groups that are read at a time."""
ROOM = 8192
"""Logits near the end of a nucleus that a row may list."""
LEAST_WIDTH = 512
STATS_WARPS = 4
ROW_WARPS = 16
"""At most; 8 for 4,096 groups."""
ROW_REGISTERS: dict[str, int] = {"maxnreg": 128} if torch.version.cuda else {}
"""So that two rows of 8 warps fit on a multiprocessor; more would save 48 bytes of spills and cost half of the rows."""

group_stats, draw_rows = Launcher(triton_kernels.group_stats), Launcher(triton_kernels.draw_rows)


def sample_triton(logits: torch.Tensor, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [n] int64 drawn from logits [n, vocab_size] float32, and the smallest scaled logits [n] that might be.

    `params` [n, 8] int32 is `SamplingBatch.packed` on the same device.
    """
    n, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    group = max(GROUP, next_power_of_2(cdiv(vocab_size, MOST_GROUPS)))
    num_groups = cdiv(vocab_size, group)
    num_tiles = cdiv(num_groups, TILE)
    width = max(LEAST_WIDTH, next_power_of_2(num_groups))
    maxima = torch.empty(n, num_groups, dtype=torch.float32, device=logits.device)
    sums = torch.empty(n, num_groups, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(n, num_groups, dtype=torch.int32, device=logits.device)
    near = torch.empty(n, ROOM, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    least = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n == 0:
        return tokens, least
    stride = logits.stride(0)
    group_stats(
        (n * num_tiles,),
        logits,
        stride,
        params,
        maxima,
        sums,
        vocab_size,
        num_groups,
        num_tiles,
        group,
        TILE,
        num_warps=STATS_WARPS,
    )
    draw_rows(
        (n,),
        logits,
        stride,
        params,
        maxima,
        sums,
        chosen,
        near,
        tokens,
        least,
        vocab_size,
        num_groups,
        group,
        TILE,
        width,
        ROOM,
        num_warps=max(STATS_WARPS, min(ROW_WARPS, width // 512)),
        **ROW_REGISTERS,
    )
    return tokens, least
