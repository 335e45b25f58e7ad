"""Classifier-free guidance (Sanchez et al. 2023, arXiv 2306.17806)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.kernels.async_copy import to_device
from slotline.registry.contracts import Companion, LogitsBatch, LogitsProcessorContext


class Guidance:
    """Log-probabilities of the prompt, moved away from those that the negative prompt gives with the same output."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._scale = np.ones(context.max_requests, np.float32)

    def validate(self, params: Mapping[str, Any]) -> None:
        """Do nothing, because `SamplingParams` checks the parameters' ranges."""

    def companion(self, params: Mapping[str, Any], prompt_token_ids: list[int]) -> Companion | None:
        """Return the negative prompt, or the prompt's last token without one."""
        scale = params.get("guidance_scale", 1.0)
        if np.float32(scale) == 1:
            return None
        token_ids = params.get("negative_prompt_token_ids") or prompt_token_ids[-1:]
        prompt = params.get("negative_prompt") or tuple(token_ids)
        return Companion(prompt=prompt, name="negative_prompt", asked=f"guidance_scale={scale}")

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Write the row's scale. 1 changes nothing."""
        self._scale[row] = params.get("guidance_scale", 1.0)
        return bool(self._scale[row] != 1)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Compute ``other + scale * (own - other)`` of log-probabilities, except if one of them is minus infinity."""
        assert batch.companion_logits is not None  # as the descriptor asks
        own, other = logits.log_softmax(dim=-1), batch.companion_logits.log_softmax(dim=-1)
        scale = to_device(self._scale[batch.rows], logits.device)[:, None]
        possible = own.isfinite() & other.isfinite()  # no scale makes a number of two infinities
        return torch.where(possible, other + scale * (own - other), own)

    def release(self, row: int) -> None:
        """Do nothing, because the next request of the row writes its own values."""
