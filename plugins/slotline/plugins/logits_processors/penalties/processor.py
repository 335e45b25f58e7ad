"""Presence, frequency and repetition penalties over the tokens so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext


class Penalties:
    """Keeps the three penalties of each row; counts tokens afresh from the rows' history in each step.

    Repetition looks at prompt and output (Keskar et al. 2019, section 4.1); presence and frequency at the output alone.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._presence = np.zeros(context.max_requests, np.float32)
        self._frequency = np.zeros(context.max_requests, np.float32)
        self._repetition = np.ones(context.max_requests, np.float32)

    def validate(self, params: Mapping[str, Any]) -> None:
        """The parameters' ranges are checked by `SamplingParams`."""

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Write the row's penalties."""
        self._presence[row] = params.get("presence_penalty", 0.0)
        self._frequency[row] = params.get("frequency_penalty", 0.0)
        self._repetition[row] = params.get("repetition_penalty", 1.0)
        return bool(self._presence[row] or self._frequency[row] or self._repetition[row] != 1)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Penalise [n, vocab_size] logits."""
        if (self._repetition[batch.rows] != 1).any():
            seen = self._counts(logits, batch, np.zeros_like(batch.num_tokens)) > 0
            factor = _column(self._repetition, batch, logits)
            logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        if self._presence[batch.rows].any() or self._frequency[batch.rows].any():
            counts = self._counts(logits, batch, batch.num_prompt_tokens)
            logits = logits - _column(self._frequency, batch, logits) * counts
            logits = logits - _column(self._presence, batch, logits) * (counts > 0)
        return logits

    def release(self, row: int) -> None:
        """The next request of the row writes its own."""

    @staticmethod
    def _counts(logits: torch.Tensor, batch: LogitsBatch, first: npt.NDArray[np.int64]) -> torch.Tensor:
        """How often each token stands at positions first .. num_tokens - 1 of its row, and among the drafts assumed.

        Returns [n, vocab_size] float32.
        """
        width = int(batch.num_tokens.max(initial=0))
        position = np.arange(width)
        inside = (position >= first[:, None]) & (position < batch.num_tokens[:, None])
        ids = batch.token_table[batch.rows, :width].astype(np.int64)
        if batch.draft_token_ids is not None:
            drafts = batch.draft_token_ids
            inside = np.concatenate([inside, np.arange(drafts.shape[1]) < batch.draft_positions[:, None]], 1)
            ids = np.concatenate([ids, drafts], 1)
        ids = np.where(inside, ids, 0)  # what lies outside is not ours to read
        return torch.zeros_like(logits).scatter_add_(
            1, torch.from_numpy(ids).to(logits.device), torch.from_numpy(inside.astype(np.float32)).to(logits.device)
        )


def _column(values: npt.NDArray[np.float32], batch: LogitsBatch, like: torch.Tensor) -> torch.Tensor:
    """The batch's rows of a per-row array as [n, 1] on the logits' device."""
    return torch.from_numpy(values[batch.rows]).to(like.device)[:, None]
