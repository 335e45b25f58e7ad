"""Tokens taken out of the choice, for processors that ban single ones."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from slotline.kernels.async_copy import to_device


def ban(logits: torch.Tensor, rows: npt.NDArray[Any], tokens: npt.NDArray[Any]) -> None:
    """Set single logits to minus infinity, in place and without waiting for the device.

    Assigning a Python number to indexed places would wait, because torch copies it from pageable memory.

    Args:
        logits: [rows, vocab].
        rows: [m] rows of `logits`.
        tokens: [m] the token banned in each.
    """
    if len(rows):
        places = to_device(rows, logits.device), to_device(tokens, logits.device)
        logits.index_put_(places, logits.new_full((), -torch.inf))
