"""Presence, frequency and repetition penalties over the tokens so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.kernels.async_copy import to_device
from slotline.kernels.triton_support import has_triton
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext

if TYPE_CHECKING:
    from slotline.plugins.logits_processors.penalties.device_counts import DeviceCounts


class Penalties:
    """Repetition, presence and frequency penalties of each row.

    On a CUDA device with Triton, tokens are counted as they come. Elsewhere they are counted anew from the rows'
    history in each step.

    Repetition considers prompt and output (Keskar et al. 2019, section 4.1). Presence and frequency consider only the
    output.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._penalties = np.zeros((3, context.max_requests), np.float32)
        self._presence, self._frequency, self._repetition = self._penalties
        self._repetition[:] = 1
        self._counts: DeviceCounts | None = None
        if context.device.startswith("cuda") and has_triton():
            from slotline.plugins.logits_processors.penalties.device_counts import DeviceCounts, warm_up

            warm_up(context.vocab_size, context.device)
            self._counts = DeviceCounts(context.max_requests, context.vocab_size, context.device)

    def validate(self, params: Mapping[str, Any]) -> None:
        """Do nothing, because `SamplingParams` checks the parameters' ranges."""

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Write the row's penalties."""
        self._presence[row] = params.get("presence_penalty", 0.0)
        self._frequency[row] = params.get("frequency_penalty", 0.0)
        self._repetition[row] = params.get("repetition_penalty", 1.0)
        if self._counts is not None:
            self._counts.forget(row)
        return bool(self._presence[row] or self._frequency[row] or self._repetition[row] != 1)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Penalise [n, vocab_size] logits in place, only for tokens in the history."""
        if self._counts is not None:
            return self._counts.apply(logits, batch, self._penalties)
        if (self._repetition[batch.rows] != 1).any():
            ids, inside = self._history(batch, np.zeros_like(batch.num_tokens), logits.device)
            factor = torch.where(inside.any(1, keepdim=True), _column(self._repetition, batch, logits), 1)
            found = logits.gather(1, ids)
            logits = logits.scatter_(1, ids, torch.where(found > 0, found / factor, found * factor))
        if self._presence[batch.rows].any() or self._frequency[batch.rows].any():
            ids, inside = self._history(batch, batch.num_prompt_tokens, logits.device)
            penalty = _column(self._presence, batch, logits) * inside.any(1, keepdim=True)
            found = logits.gather(1, ids)
            if self._frequency[batch.rows].any():
                counts = torch.zeros_like(logits).scatter_add_(1, ids, inside.to(logits.dtype)).gather(1, ids)
                found = found - _column(self._frequency, batch, logits) * counts
            logits = logits.scatter_(1, ids, found - penalty)
        return logits

    def release(self, row: int) -> None:
        """Do nothing, because the next request of the row writes its own values."""

    @staticmethod
    def _history(
        batch: LogitsBatch, first: npt.NDArray[np.int64], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens at positions first .. num_tokens - 1 of each row and the assumed drafts, unordered.

        The result is [n, width] int64, padded with a token of the row (with 0 for a row without tokens), so that all
        places of a token can be written with the same number. A mask of the places without padding is returned too.
        """
        width = int(batch.num_tokens.max(initial=0))
        start = int(first.min(initial=width))
        position = np.arange(start, width)
        inside = (position >= first[:, None]) & (position < batch.num_tokens[:, None])
        ids = batch.token_table[batch.rows, start:width].astype(np.int64)
        if batch.draft_token_ids is not None:
            drafts = batch.draft_token_ids
            inside = np.concatenate([inside, np.arange(drafts.shape[1]) < batch.draft_positions[:, None]], 1)
            ids = np.concatenate([ids, drafts], 1)
        if not inside.shape[1]:
            inside, ids = np.zeros((len(ids), 1), bool), np.zeros((len(ids), 1), np.int64)
        some = np.take_along_axis(ids, inside.argmax(1)[:, None], 1)  # what lies outside is not ours to read
        ids = np.where(inside, ids, np.where(inside.any(1, keepdims=True), some, 0))
        return to_device(ids, device), to_device(inside, device)


def _column(values: npt.NDArray[np.float32], batch: LogitsBatch, like: torch.Tensor) -> torch.Tensor:
    """Return the batch's rows of a per-row array as [n, 1] on the logits' device."""
    return to_device(values[batch.rows], like.device)[:, None]
