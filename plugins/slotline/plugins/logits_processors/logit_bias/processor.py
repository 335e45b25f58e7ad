"""Adds a per-request bias to chosen tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.kernels.async_copy import to_device
from slotline.plugins.logits_processors.row_values import RowValues
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr


class LogitBias:
    """Keeps the token ids and biases of each row that has any."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._tokens = RowValues(context.max_requests)
        self._biases = RowValues(context.max_requests, dtype=np.float32)

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check that token ids are in the vocabulary, and biases numbers in [-100, 100]."""
        for token, bias in (params.get("logit_bias") or {}).items():
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"logit_bias names token {token!r}", fix=f"token ids are 0 to {self._vocab_size - 1}"
                )
            if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias[{token}]={safe_repr(bias, 80)} is not allowed", fix="a bias is a number in [-100, 100]"
                )

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Keep the request's biases."""
        biases = params.get("logit_bias") or {}
        if biases:
            self._tokens.set(row, list(biases))
            self._biases.set(row, list(biases.values()))
        return bool(biases)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Add each row's biases in place."""
        arrays = (*self._tokens.take(batch.rows), self._biases.take(batch.rows)[1])
        entries, tokens, biases = (to_device(array, logits.device) for array in arrays)
        logits[entries, tokens] += biases  # no token twice in a row: they are keys of a mapping
        return logits

    def release(self, row: int) -> None:
        """Forget the row's biases."""
        self._tokens.drop(row)
        self._biases.drop(row)
