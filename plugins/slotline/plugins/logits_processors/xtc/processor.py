"""XTC ("exclude top choices"), as p-e-w proposed it for text-generation-webui (pull request 6335, 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.core.sampling.sampler import uniforms
from slotline.kernels.async_copy import to_device
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

_CHANCE = np.uint64(0xC2B2AE3D27D4EB4F)
"""Sets the numbers that decide here apart from those that draw tokens."""


class Xtc:
    """Exclusion of top choices.

    With a row's probability, at each position anew, all tokens whose probability reaches the threshold are banned
    except the least likely of them. The decision depends only on the request's seed and the position, never on the
    batch.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._probability = np.zeros(context.max_requests, np.float64)
        self._threshold = np.zeros(context.max_requests, np.float32)
        self._seed = np.zeros(context.max_requests, np.uint64)

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check that both are numbers in [0, 1]."""
        for name in ("xtc_probability", "xtc_threshold"):
            value = params.get(name, 0.0)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
                raise RequestError(f"{name}={safe_repr(value, 80)} is not allowed", fix="give a number in [0, 1]")

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Write the row's numbers. With a threshold above 0.5 there is never a second token to keep."""
        self._probability[row] = params.get("xtc_probability", 0.0)
        self._threshold[row] = params.get("xtc_threshold", 0.1)
        self._seed[row] = (params.get("seed") or 0) & (2**64 - 1)
        return bool(self._probability[row] and self._threshold[row] <= 0.5)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Ban the likely tokens of the rows whose number says so."""
        excludes = uniforms(self._seed[batch.rows] ^ _CHANCE, batch.lengths) < self._probability[batch.rows]
        if not excludes.any():
            return logits
        threshold = to_device(np.where(excludes, self._threshold[batch.rows], np.float32(2)), logits.device)
        likely = logits.softmax(dim=-1) >= threshold[:, None]
        least = logits.masked_fill(~likely, torch.inf).amin(dim=-1, keepdim=True)
        return logits.masked_fill(likely & (logits > least), -torch.inf)

    def release(self, row: int) -> None:
        """Do nothing, because the next request of the row writes its own values."""
