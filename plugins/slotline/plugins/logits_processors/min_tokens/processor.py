"""Keeps stop tokens out until a request has its minimum of output tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.plugins.logits_processors.bans import ban
from slotline.plugins.logits_processors.row_values import RowValues
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext


class MinTokens:
    """Keeps each row's minimum and the tokens that would end it."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._eos = context.eos_token_ids
        self._vocab_size = context.vocab_size
        self._minimum = np.zeros(context.max_requests, np.int64)
        self._stops = RowValues(context.max_requests)

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check the parameters. `SamplingParams` checks the parameter's own range."""

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Collect the tokens that end this request."""
        minimum = params.get("min_tokens") or 0
        stops = {*params.get("stop_token_ids", ()), *(() if params.get("ignore_eos") else self._eos)}
        stops = {token for token in stops if token < self._vocab_size}
        if minimum <= 0 or not stops:
            return False
        self._minimum[row] = minimum
        self._stops.set(row, sorted(stops))
        return True

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Set the stop tokens of rows that are too short to minus infinity, in place."""
        num_output = batch.num_tokens - batch.num_prompt_tokens + batch.draft_positions
        short = np.flatnonzero(num_output < self._minimum[batch.rows])
        entries, tokens = self._stops.take(batch.rows[short])
        ban(logits, short[entries], tokens)
        return logits

    def release(self, row: int) -> None:
        """Forget the row."""
        self._stops.drop(row)
