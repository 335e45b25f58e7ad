"""Embeddings of items that are added behind the first decoder layers (DeepStack of Qwen3-VL)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from slotline.plugins.model_families.tensor_parallel.token_division import TokenDivision


@contextmanager
def added(
    layers: Sequence[nn.Module], index: torch.Tensor, values: torch.Tensor, tokens: TokenDivision
) -> Iterator[None]:
    """Add `values` behind the first layers inside, by hooks. These layers run by their own forward then.

    Args:
        layers: all decoder layers.
        index: [n] int64, which of the step's tokens.
        values: [k, n, hidden_size], what the first k layers add to these tokens.
        tokens: division of the step's tokens among ranks.
    """
    with ExitStack() as scope:
        for layer, value in zip(layers, values, strict=False):
            scope.enter_context(layer.register_forward_hook(_adding(index, value, tokens)))
        yield


def _adding(index: torch.Tensor, value: torch.Tensor, tokens: TokenDivision) -> Callable[..., Any]:
    def add(_module: Any, _given: Any, out: torch.Tensor) -> torch.Tensor:
        there = index.to(out.device, non_blocking=True)
        rows = value.to(out.device, non_blocking=True)
        if not tokens.divided:
            return out.index_add(1, there, rows[None])
        whole = out.new_zeros((1, tokens.count, out.shape[-1])).index_add(1, there, rows[None])
        return out + tokens.own(whole)

    return add
