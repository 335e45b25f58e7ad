"""Forces the first and the last token of an output. The rules are those of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.kernels.async_copy import to_device
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

NAMES = ("forced_bos_token_id", "forced_eos_token_id")


class ForcedTokens:
    """Keeps each row's two tokens and the number of output tokens before them. -1 for none."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size, self._max_model_len = context.vocab_size, context.max_model_len
        self._tokens = np.full((context.max_requests, 2), -1, np.int64)
        self._places = np.zeros((context.max_requests, 2), np.int64)

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check that both are tokens of the model, or None."""
        for name in NAMES:
            token = params.get(name)
            whole = isinstance(token, int) and not isinstance(token, bool)
            if token is not None and not (whole and 0 <= token < self._vocab_size):
                raise RequestError(
                    f"{name}={safe_repr(token, 80)} is not allowed",
                    fix=f"give a token id from 0 to {self._vocab_size - 1}, or None for none",
                )

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Write the row's tokens. The first one is forced only behind a prompt of one token."""
        first, last = (params.get(name) for name in NAMES)
        count = len(prompt_token_ids)
        longest = self._max_model_len - count
        self._tokens[row] = (
            -1 if first is None or count != 1 else first,
            -1 if last is None else last,
        )
        self._places[row] = 0, min(params.get("max_tokens") or longest, longest) - 1
        return bool((self._tokens[row] >= 0).any())

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Leave only the forced token in rows that are at its place, in place. The last one prevails."""
        places = (batch.lengths - batch.num_prompt_tokens)[:, None]
        forced = np.where(places == self._places[batch.rows], self._tokens[batch.rows], -1)  # [num_logits, 2]
        tokens = np.where(forced[:, 1] >= 0, forced[:, 1], forced[:, 0])
        entries = np.flatnonzero(tokens >= 0)
        if len(entries):
            at, chosen = to_device(entries, logits.device), to_device(tokens[entries], logits.device)
            kept = logits[at, chosen]  # minus infinity if another rule bans it, so that the request fails
            logits.index_fill_(0, at, -torch.inf)
            logits.index_put_((at, chosen), kept)
        return logits

    def release(self, row: int) -> None:
        """Do nothing, because the next request of the row writes its own tokens."""
