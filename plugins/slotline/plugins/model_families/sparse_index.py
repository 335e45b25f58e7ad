"""Sparse attention by an index of keys (DeepSeek-V3.2, GLM-5, MiniMax-M3), for texts of which it picks every key.

An indexer scores all earlier tokens and picks a number of the best. Up to that number it picks all of them, and
attention is dense. Indexers are left out here, and longer texts are refused: no cache keeps the keys of an index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slotline.registry.errors import ModelError

INDEXER = "indexer"


def longest_dense(hf_model: Any) -> int | None:
    """Return the longest text in which every key is picked, or None for a model without an index.

    Raises:
        ModelError: if an index does not say how many keys it picks.
    """
    sizes = [_picked(module.indexer) for module in hf_model.modules() if _has_index(module)]
    return min(sizes) if sizes else None


def leave_out(hf_model: Any) -> Any:
    """Return the model, whose attention is dense afterwards."""
    for module in hf_model.modules():
        if _has_index(module):
            module.indexer.forward = _picking_nothing
            module.forward = _with_mask(module.forward)
    return hf_model


def settle(hf_model: Any, max_model_len: int) -> None:
    """Refuse texts in which the index would leave keys out.

    Raises:
        ModelError: if `max_model_len` allows such texts.
    """
    longest = longest_dense(hf_model)
    if longest is not None and max_model_len > longest:
        raise ModelError(
            f"{type(hf_model).__name__} picks {longest} keys by an index in longer texts, which this version does not "
            f"serve; max_model_len is {max_model_len}",
            fix=f"set scheduler.max_model_len = {longest} or less",
        )


def _has_index(module: Any) -> bool:
    return isinstance(getattr(module, INDEXER, None), nn.Module)


def _picked(indexer: Any) -> int:
    """Return the number of keys that an index picks, one by one (DeepSeek) or in blocks (MiniMax-M3)."""
    if hasattr(indexer, "index_topk"):
        return int(indexer.index_topk)
    if hasattr(indexer, "topk_blocks") and hasattr(indexer, "block_size"):
        return int(indexer.topk_blocks) * int(indexer.block_size)
    raise ModelError(
        f"{type(indexer).__name__} picks the keys of sparse attention in a way that this family does not know",
        fix="use a model family plugin that serves this architecture",
    )


def _picking_nothing(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return no indices, [1, num_tokens, 0]."""
    return hidden_states.new_empty((*hidden_states.shape[:2], 0), dtype=torch.int32)


def _with_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of attention with a mask that only the indexer would read."""

    def forward(hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not args and options.get("attention_mask") is None:
            options["attention_mask"] = hidden_states.new_zeros((1, 1, 1, 1))
        return original(hidden_states, *args, **options)

    return forward
