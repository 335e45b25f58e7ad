"""Keeps each row's allowed tokens and bans the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.kernels.async_copy import to_device
from slotline.plugins.logits_processors.row_values import RowValues
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError


class AllowedTokenIds:
    """The allowed token ids of each row that names some."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._allowed = RowValues(context.max_requests)

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check that token ids are in the vocabulary. `SamplingParams` checks their type."""
        for token in params.get("allowed_token_ids") or ():
            if token >= self._vocab_size:
                raise RequestError(
                    f"allowed_token_ids names token {token}", fix=f"token ids are 0 to {self._vocab_size - 1}"
                )

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Keep the request's tokens."""
        allowed = params.get("allowed_token_ids")
        if allowed:
            self._allowed.set(row, sorted(set(allowed)))
        return bool(allowed)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Copy the allowed logits into rows of minus infinity."""
        entries, tokens = (to_device(array, logits.device) for array in self._allowed.take(batch.rows))
        result = torch.full_like(logits, -torch.inf)
        result[entries, tokens] = logits[entries, tokens]
        return result

    def release(self, row: int) -> None:
        """Forget the row's tokens."""
        self._allowed.drop(row)
