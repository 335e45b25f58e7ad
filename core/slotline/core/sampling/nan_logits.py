"""Rows of logits that hold NaN: the draw notices them, and a negative number takes the place of their tokens.

Noticing costs no pass over the logits. The likeliest token of a row with NaN is the place of one, and a draw meets NaN
in the sums that it makes anyway.
"""

from __future__ import annotations

import numpy as np
import torch

from slotline.core.sampling.argmax import argmax

NAN_LOGITS = -4
"""Mark in place of a token whose row of logits holds NaN."""


def argmax_checked(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the likeliest token of each row [n, vocab_size], and which rows hold NaN, without waiting for the device.

    Returns:
        Tokens [n] int64 as `argmax` gives them, and [n] bool, or None if no row holds NaN.
    """
    if logits.device.type != "cpu":
        tokens = argmax(logits)
        return tokens, logits.gather(1, tokens[:, None]).squeeze(1).isnan()
    values, tokens = logits.max(-1)  # one pass for both, as fast as argmax
    if np.isnan(values.numpy().sum()):  # infinities of both signs give NaN as well
        found = values.isnan()
        return tokens, found if found.any() else None
    return tokens, None


def marked_nan(tokens: torch.Tensor, holds_nan: torch.Tensor | None, *, marks: bool) -> torch.Tensor:
    """Return the tokens [n] int64 with `NAN_LOGITS` where rows hold NaN.

    Args:
        marks: whether there may be other marks among the tokens. These are kept.
    """
    if holds_nan is None:
        return tokens
    return tokens.masked_fill(holds_nan & (tokens >= 0) if marks else holds_nan, NAN_LOGITS)
