"""DRY ("don't repeat yourself"), as p-e-w proposed it for text-generation-webui (pull request 5677, 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.kernels.async_copy import to_device
from slotline.plugins.logits_processors.row_values import RowValues
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

Int = npt.NDArray[np.int64]
_LARGEST = 1e9
_LONGEST = 50
"""Longer passages are penalised as one of this length, which bounds the work and keeps the penalty finite."""


class Dry:
    """Penalty for tokens that continue a repetition.

    If a token would repeat a passage of the last n tokens of the history, n at least allowed_length, its logit is
    lowered by multiplier * base ** (n - allowed_length). Passages do not cross a sequence breaker.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._multiplier = np.zeros(context.max_requests, np.float32)
        self._base = np.zeros(context.max_requests, np.float32)
        self._allowed = np.zeros(context.max_requests, np.int64)
        self._last_n = np.zeros(context.max_requests, np.int64)
        self._breakers = RowValues(context.max_requests)

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check that the numbers are in the ranges named in the errors."""
        _number(params, "dry_multiplier", 0.0, "0, for none, or more")
        _number(params, "dry_base", 1.0, "1 or more")
        _whole(params, "dry_allowed_length", 1)
        _whole(params, "dry_penalty_last_n", -1)
        breakers = params.get("dry_sequence_breaker_ids", ())
        if not isinstance(breakers, list | tuple) or not all(
            isinstance(token, int) and 0 <= token < self._vocab_size for token in breakers
        ):
            raise RequestError(
                f"dry_sequence_breaker_ids={safe_repr(breakers, 80)} is not allowed",
                fix=f"give a list of token ids from 0 to {self._vocab_size - 1}",
            )

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Write the row's numbers, with the proposal's defaults."""
        self._multiplier[row] = params.get("dry_multiplier", 0.0)
        self._base[row] = params.get("dry_base", 1.75)
        self._allowed[row] = params.get("dry_allowed_length", 2)
        self._last_n[row] = params.get("dry_penalty_last_n", -1)
        active = bool(self._multiplier[row]) and bool(self._last_n[row])
        if active:
            self._breakers.set(row, sorted(set(params.get("dry_sequence_breaker_ids", ()))))
        return active

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Lower the logits of tokens that would continue a repetition."""
        lengths, tokens = self._repeats(batch)  # [n, places]
        longest = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
        longest.scatter_reduce_(1, to_device(tokens, logits.device), to_device(lengths, logits.device), "amax")
        multiplier, base, allowed = (
            to_device(values[batch.rows], logits.device)[:, None]
            for values in (self._multiplier, self._base, self._allowed)
        )
        penalty = multiplier * base ** (longest - allowed)
        return torch.where(longest >= allowed, logits - penalty, logits)

    def _repeats(self, batch: LogitsBatch) -> tuple[Int, Int]:
        """Return the length of the passage that each token of the history would continue [n, places], and tokens."""
        history = batch.tail()
        width = history.shape[1]
        last_n = self._last_n[batch.rows][:, None]
        place = np.arange(width)
        history = np.where((last_n < 0) | (place >= width - last_n), history, -1)
        breaks = self._breaks(batch, history)
        follows = history[:, 1:]
        alive = (follows >= 0) & ~breaks[:, 1:]
        lengths = np.zeros(follows.shape, np.int64)
        for back in range(min(_LONGEST, width - 1)):
            newest = history[:, width - 1 - back, None]
            before = np.full(follows.shape, -1, np.int64)
            before[:, back:] = history[:, : width - 1 - back]
            alive &= (before == newest) & (newest >= 0) & ~breaks[:, width - 1 - back, None]
            if not alive.any():
                break
            lengths += alive
        return lengths, np.where(follows >= 0, follows, 0)

    def _breaks(self, batch: LogitsBatch, history: Int) -> npt.NDArray[np.bool_]:
        """Return the tokens of the history [n, width] that are sequence breakers of their row."""
        entries, tokens = self._breakers.take(batch.rows)
        if not len(entries):
            return np.zeros(history.shape, bool)
        keys = entries * (self._vocab_size + 1) + tokens
        found: npt.NDArray[np.bool_] = np.isin(
            np.arange(len(history))[:, None] * (self._vocab_size + 1) + history, keys
        )
        return found & (history >= 0)

    def release(self, row: int) -> None:
        """Forget the row's breakers."""
        self._breakers.drop(row)


def _number(params: Mapping[str, Any], name: str, least: float, allowed: str) -> None:
    value = params.get(name, least)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= _LARGEST:
        raise RequestError(
            f"{name}={safe_repr(value, 80)} is not allowed", fix=f"give a number, {allowed}, up to {_LARGEST:g}"
        )


def _whole(params: Mapping[str, Any], name: str, least: int) -> None:
    value = params.get(name, least)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise RequestError(
            f"{name}={safe_repr(value, 80)} is not allowed", fix=f"give an integer from {least} to 2147483647"
        )
