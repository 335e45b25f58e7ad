"""Rows of logits that hold NaN: the draw notices them, and a negative number takes the place of their tokens.

Noticing costs no pass over the logits. The likeliest token of a row with NaN is the place of one, and a draw meets NaN
in the sums that it makes anyway.
"""

from __future__ import annotations

import torch

NAN_LOGITS = -4
"""Mark in place of a token whose row of logits holds NaN."""


def marked_nan(tokens: torch.Tensor, holds_nan: torch.Tensor | None, *, marks: bool) -> torch.Tensor:
    """Return the tokens [n] int64 with `NAN_LOGITS` where rows hold NaN.

    Args:
        marks: whether there may be other marks among the tokens. These are kept.
    """
    if holds_nan is None:
        return tokens
    return tokens.masked_fill(holds_nan & (tokens >= 0) if marks else holds_nan, NAN_LOGITS)
