"""Adds a per-request bias to chosen tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError


class LogitBias:
    """Keeps the token ids and biases of each row that has any."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._device = context.device
        self._biases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def validate(self, params: Mapping[str, Any]) -> None:
        """Token ids must be in the vocabulary, biases numbers in [-100, 100]."""
        for token, bias in (params.get("logit_bias") or {}).items():
            if not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"logit_bias names token {token!r}", fix=f"token ids are 0 to {self._vocab_size - 1}"
                )
            if not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias[{token}]={bias!r} is not allowed", fix="a bias is a number in [-100, 100]"
                )

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Take the request's biases to the device."""
        biases = params.get("logit_bias") or {}
        if biases:
            tokens = torch.tensor(list(biases), dtype=torch.int64, device=self._device)
            values = torch.tensor(list(biases.values()), dtype=torch.float32, device=self._device)
            self._biases[row] = (tokens, values)
        return bool(biases)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Add each row's biases in place."""
        for position, row in enumerate(batch.rows.tolist()):
            tokens, values = self._biases[row]
            logits[position, tokens] += values
        return logits

    def release(self, row: int) -> None:
        """Forget the row's biases."""
        del self._biases[row]
