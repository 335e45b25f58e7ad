"""Allowed error of a state plugin.

The truth is the recurrence in float64 on the inputs as given. The baseline is the same recurrence with as much rounding
as the contract allows: float32, operands of products rounded to the activation dtype, the state rounded to its dtype
after each token. The largest error of a tensor may be

    RATIO * (largest error of the baseline) + FLOOR * eps(float32) * (1 + length) * scale + ULPS * eps(dtype) * scale

where `scale` is the largest absolute value of the truth, `dtype` is what the tensor is kept in, and `length` is the
number of the request's tokens plus the largest sum of |log decay| over them. Each token may cost one rounding of its
decay (a GPU's fast exponential always errs to the same side), and chunked forms take differences of summed log decays.
The floor matters where the baseline is lucky or exact, as for float32; it stays far below what a bug does, or a
state that is kept in bfloat16 or multiplied in TF32.

Measured on the two right implementations of `slotline.testing.reference.state` (token by token, and by chunks with
other arithmetic), 40 seeds of every kind, dtype pair and size, 1 to 300 tokens, memories of 0.5 to 2000 tokens:

* Their error was up to 13 times the baseline's in float32 and 5 times where activations and state are bfloat16, so the
    ratio alone would raise false alarms.
* With RATIO and ULPS as below, FLOOR had to be at least 0.12, for the state of mamba2 by chunks in float32.
* With the constants below they use at most 0.57 of the allowed error.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

RATIO = 3.0
FLOOR = 2.0
ULPS = 2.0


def allowed_error(truth: Tensor, baseline: Tensor, dtype: torch.dtype, length: float) -> tuple[float, float]:
    """Return the allowed largest error of a tensor, and the baseline's own.

    `baseline` is not yet rounded to `dtype`.
    """
    scale = float(truth.abs().max())
    own = float((baseline.to(dtype).double() - truth).abs().max())
    floor = FLOOR * torch.finfo(torch.float32).eps * (1 + length) * scale
    return RATIO * own + floor + ULPS * torch.finfo(dtype).eps * scale, own


def largest_error(got: Tensor, truth: Tensor) -> tuple[float, tuple[int, ...]]:
    """Return the largest distance from the exact values and its place. Infinite if any value is not finite."""
    distance = (got.double() - truth).abs().nan_to_num(nan=float("inf"))
    place = np.unravel_index(int(distance.argmax()), distance.shape)
    return float(distance.max()), tuple(int(i) for i in place)
