"""Rows of logits that hold NaN: the draw notices them, and a negative number takes the place of their tokens.

Noticing costs no pass over the logits. The likeliest token of a row with NaN is the place of one, and a draw meets NaN
in the sums that it makes anyway.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

NAN_LOGITS = -4
"""What stands in place of a token whose row of logits holds NaN."""


def nan_at(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return which rows [n] bool have NaN at their token, without waiting for the device. None says that none has.

    Args:
        logits: [n, vocab_size].
        tokens: [n] int64, of each row the likeliest, which is the place of NaN if there is any.
    """
    if not logits.is_cpu:
        return logits.gather(1, tokens[:, None]).squeeze(1).isnan()
    if logits.is_contiguous():  # in half the time of an index of two parts
        values = logits.numpy().ravel().take(tokens.numpy() + _starts(*logits.shape))
    else:
        values = logits.numpy()[np.arange(len(tokens)), tokens.numpy()]
    whole = np.add.reduce(values)
    if whole == whole:  # one look instead of one for each row; infinities of both signs are looked at closely
        return None
    found = np.isnan(values)
    return torch.from_numpy(found) if found.any() else None


@lru_cache(maxsize=64)
def _starts(count: int, size: int) -> npt.NDArray[np.int64]:
    """Return where each of `count` contiguous rows of a size begins, [count]."""
    return np.arange(count) * size


def marked_nan(tokens: torch.Tensor, holds_nan: torch.Tensor | None, *, marks: bool) -> torch.Tensor:
    """Return the tokens [n] int64 with `NAN_LOGITS` where rows hold NaN.

    Args:
        marks: whether other marks may stand among the tokens, which stay.
    """
    if holds_nan is None:
        return tokens
    return tokens.masked_fill(holds_nan & (tokens >= 0) if marks else holds_nan, NAN_LOGITS)
