"""Slow and simple forms of some processors, which the conformance suite compares with the fast ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any


def penalties(
    params: Mapping[str, Any], prompt: Sequence[int], output: Sequence[int], logits: Sequence[float]
) -> list[float]:
    """Return one row as `penalties` should change it: repetition first, then frequency and presence."""
    changed = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            factor = params["repetition_penalty"]
            logit = logit / factor if logit > 0 else logit * factor
        times = list(output).count(token)
        changed.append(logit - params["frequency_penalty"] * times - params["presence_penalty"] * (times > 0))
    return changed


def logit_bias(
    params: Mapping[str, Any], prompt: Sequence[int], output: Sequence[int], logits: Sequence[float]
) -> list[float]:
    """Return one row as `logit_bias` should change it."""
    return [logit + params["logit_bias"].get(token, 0.0) for token, logit in enumerate(logits)]


def allowed_token_ids(
    params: Mapping[str, Any], prompt: Sequence[int], output: Sequence[int], logits: Sequence[float]
) -> list[float]:
    """Return one row as `allowed_token_ids` should change it."""
    return [logit if token in params["allowed_token_ids"] else -inf for token, logit in enumerate(logits)]
