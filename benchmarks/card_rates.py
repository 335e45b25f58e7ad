"""The rates that this card reaches, which limits are computed from."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch


class Rates(NamedTuple):
    """Bytes and operations of a second that the card reaches."""

    bandwidth: float
    operations: float

    def __str__(self) -> str:
        name = torch.cuda.get_device_name()
        return f"{name}: {self.bandwidth / 1e12:.2f} TB/s, {self.operations / 1e12:.0f} TFLOP/s"


@cache
def measured_rates() -> Rates:
    """Time a copy of 2 GiB and a product of 8,192 x 8,192 x 8,192 in bfloat16, the best of some."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(8))
    product = min(_seconds(lambda: matrix @ matrix) for _ in range(8))
    return Rates(2 * source.nbytes / copy, 2 * 8192**3 / product)


def _seconds(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
