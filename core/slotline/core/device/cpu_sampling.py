"""Sampling on a CPU: cumulative sums over only the tokens that are left."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.device.packed_parameters import PackedParameters


def draw_among(
    logits: torch.Tensor, least: torch.Tensor, columns: PackedParameters
) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
    """Draw one token per row, [n] int64, among the logits of at least `least` [n, 1], if these are few.

    The logits [n, vocab_size] float32 lie on the CPU. A cumulative sum in float64 over the whole vocabulary, nearly all
    of it zeros, took most of a sampling step. A row's sums, and the choice to make them here, do not depend on other
    rows.

    Returns:
        The tokens, and for which rows [n] bool there are too many to be drawn here.
    """
    values = logits.numpy()
    kept = values >= least.numpy()
    counts = np.count_nonzero(kept, axis=1)
    many = (counts > values.shape[1] // 8) | (least.numpy()[:, 0] == -np.inf)  # without a limit NaN would go unseen
    if many.any():
        kept &= ~many[:, None]
        counts[many] = 0
    rows, tokens = np.divmod(np.flatnonzero(kept), values.shape[1])  # by row, then by token
    places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = (len(values), int(counts.max(initial=1)))
    found, weights, ids = np.full(shape, -np.inf), np.zeros(shape), np.zeros(shape, np.int64)
    found[rows, places], ids[rows, places] = values[rows, tokens], tokens
    with np.errstate(invalid="ignore"):  # a row without any finite logit gets some token
        weights[rows, places] = np.exp(found[rows, places] - found.max(axis=1)[rows])
    cumulative = weights.cumsum(axis=1)
    passed = (cumulative <= columns.uniform.numpy()[:, None] * cumulative[:, -1:]).sum(axis=1)
    drawn = ids[np.arange(len(ids)), np.minimum(passed, np.maximum(counts, 1) - 1)]
    return torch.from_numpy(drawn), many
