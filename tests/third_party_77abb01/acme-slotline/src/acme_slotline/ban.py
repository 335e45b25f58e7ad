"""Keeps tokens out of the output: `always` of the configuration, and extra_args={"acme_ban": [token ids]}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError


class BanTokens:
    """One table [max_requests, vocab_size] of what each row may not say."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size, self._device = context.vocab_size, context.device
        self._always = list(context.options.always) if context.options is not None else []
        self._banned = np.zeros((context.max_requests, context.vocab_size), bool)

    def validate(self, params: Mapping[str, Any]) -> None:
        tokens = params.get("acme_ban", ())
        if not isinstance(tokens, list | tuple):
            raise RequestError(f"acme_ban={tokens!r} is no list", fix="give a list of token ids")
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocab_size:
                raise RequestError(f"acme_ban names {token!r}", fix=f"token ids are 0 to {self._vocab_size - 1}")
        if len({*tokens, *self._always}) == self._vocab_size:
            raise RequestError("acme_ban names every token", fix="leave at least one that may be said")

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        self._banned[row] = False
        self._banned[row, [*self._always, *params.get("acme_ban", ())]] = True
        return bool(self._banned[row].any())

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        mask = torch.from_numpy(self._banned[batch.rows]).to(self._device)  # [num_logits, vocab_size] bool
        return logits.masked_fill(mask, -torch.inf)

    def release(self, row: int) -> None:
        self._banned[row] = False
