"""Min-p (Nguyen et al. 2024, arXiv 2407.01082): a token stays if it is at least `min_p` times as likely as the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.kernels.async_copy import to_device
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext


class MinP:
    """Min-p, applied by the sampler as a floor on the logits (see `floor`).

    `admit` and `apply` define the same result.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._below = np.zeros(context.max_requests, np.float32)

    def validate(self, params: Mapping[str, Any]) -> None:
        """Do nothing, because `SamplingParams` checks the parameter's range."""

    def floor(self, params: Mapping[str, Any]) -> float:
        """Return the logarithm of `min_p`."""
        min_p = params.get("min_p", 0.0)
        return math.log(min_p) if min_p else -math.inf

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Write the largest distance of a kept logit from the highest, before the temperature.

        Nothing for greedy requests.
        """
        temperature, floor = params.get("temperature", 1.0), self.floor(params)
        works = temperature > 0 and floor > -math.inf
        self._below[row] = temperature * floor if works else 0
        return works

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Ban what lies further below."""
        below = to_device(self._below[batch.rows], logits.device)
        return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + below[:, None], -torch.inf)

    def release(self, row: int) -> None:
        """Do nothing, because the next request of the row writes its own values."""
