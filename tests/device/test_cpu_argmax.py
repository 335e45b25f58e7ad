"""The likeliest tokens on a CPU: as torch finds them, in every dtype of logits."""

from __future__ import annotations

import pytest
import torch

from slotline.core.device.cpu_ops import CpuOps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_first_of_the_largest_is_found_and_nan_is_noticed(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, [7, 40]] = 9.0
    assert CpuOps().argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert int(CpuOps().argmax(logits)[1]) == 7
    tokens, holds_nan = CpuOps().argmax_checked(logits)
    assert (tokens.tolist(), holds_nan) == (logits.argmax(-1).tolist(), None)
    logits[3, 100] = torch.nan
    tokens, holds_nan = CpuOps().argmax_checked(logits)
    assert (int(tokens[3]), holds_nan.tolist()) == (100, [False, False, False, True, False])  # type: ignore[union-attr]
