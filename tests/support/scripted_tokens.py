"""A logits processor for tests: forces the tokens that a request's `script` names, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.registry.contracts import LogitsBatch, LogitsProcessorCapabilities, LogitsProcessorContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import RequestError


class Script:
    """Keeps each row's script; past its end the model is free again."""

    descriptor = Descriptor(
        kind=Kind.LOGITS_PROCESSOR,
        name="script",
        capabilities=LogitsProcessorCapabilities(parameters=("script",), needs_history=True, default=True, order=1000),
        factory=None,
    )

    def __init__(self, context: LogitsProcessorContext) -> None:
        self.scripts: dict[int, list[int]] = {}

    def validate(self, params: Mapping[str, Any]) -> None:
        """A script is a list."""
        if not isinstance(params.get("script", []), list):
            raise RequestError(f"script={params['script']!r} is not allowed", fix="give a list of token ids")

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Remember the row's script."""
        if params.get("script"):
            self.scripts[row] = params["script"]
        return row in self.scripts

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Leave only the script's next token, where there is one."""
        for i, row in enumerate(batch.rows.tolist()):
            at, script = int(batch.num_tokens[i] - batch.num_prompt_tokens[i]), self.scripts[row]
            if at < len(script):
                kept = logits[i, script[at]].clone()
                logits[i] = -torch.inf
                logits[i, script[at]] = kept
        return logits

    def release(self, row: int) -> None:
        """Forget it."""
        del self.scripts[row]
