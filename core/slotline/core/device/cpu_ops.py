"""Operations on the CPU, where looking at a number costs nothing and a branch for each number costs much."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.device.torch_ops import TorchOps

_AT_A_TIME = 2**16
"""Logits."""
_MINUS_INFINITY = np.float32(-np.inf).view(np.int32)
_KEPT_BITS: npt.NDArray[np.int32] = -((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.int32)
"""[256, 8] for each byte of a mask: all bits of a number whose token is allowed, none of the others'."""


class CpuOps(TorchOps):
    """Operations of the CPU."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave it to NumPy, whose search for the largest of a row is vectorised, as torch's is not."""
        return torch.from_numpy(_numbers(logits).argmax(-1))

    def argmax_checked(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Look at the largest only: NumPy finds the first NaN of a row where there is one."""
        numbers = _numbers(logits)
        tokens = numbers.argmax(-1)
        holds_nan = np.isnan(numbers[np.arange(len(tokens)), tokens])
        return torch.from_numpy(tokens), torch.from_numpy(holds_nan) if holds_nan.any() else None

    def apply_bitmask(
        self, logits: torch.Tensor, words: torch.Tensor, rows: torch.Tensor, *, in_place: bool = False
    ) -> torch.Tensor:
        """Mask by arithmetic on the numbers' bits: a choice for each number takes ten times as long.

        A few rows at a time, so that what is made on the way stays in a core's cache.
        """
        own = in_place and logits.is_contiguous()
        result = logits if own else logits.clone(memory_format=torch.contiguous_format)
        bits, vocab_size = result.numpy().view(np.int32), logits.shape[1]
        eights, places = np.ascontiguousarray(words.numpy()).view(np.uint8), rows.numpy()
        all_rows = np.array_equal(places, np.arange(len(logits)))
        step = max(1, _AT_A_TIME // max(vocab_size, 1))
        for start in range(0, len(places), step):
            block = eights[start : start + step]
            kept = np.take(_KEPT_BITS, block, axis=0).reshape(len(block), -1)[:, :vocab_size]
            own_rows = slice(start, start + step) if all_rows else places[start : start + step]
            chosen = bits[own_rows]
            chosen ^= _MINUS_INFINITY
            chosen &= kept
            chosen ^= _MINUS_INFINITY
            bits[own_rows] = chosen
        return result

    def mark_unusable(
        self,
        logits: torch.Tensor,
        raw: torch.Tensor,
        touched: torch.Tensor | None,
        tokens: torch.Tensor,
        *,
        not_finite: int,
        none_left: int,
        all_greedy: bool,
    ) -> torch.Tensor:
        """Look only at rows of logits that need it: to find the largest takes ten times as long as its value."""
        if bool(logits.amax(dim=-1).isfinite().all()):
            return tokens.clone()
        return super().mark_unusable(
            logits, raw, touched, tokens, not_finite=not_finite, none_left=none_left, all_greedy=all_greedy
        )


def _numbers(logits: torch.Tensor) -> npt.NDArray[np.floating[Any]]:
    """Return the same numbers as NumPy has them. It has no bfloat16."""
    found: npt.NDArray[np.floating[Any]] = (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy()
    return found
