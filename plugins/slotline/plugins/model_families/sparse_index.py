"""Sparse attention by an index of keys (DeepSeek-V3.2, GLM-5, MiniMax-M3).

An indexer scores all earlier tokens and picks a number of the best. Up to that number it picks all of them, and
attention is dense.

In modules of DeepSeek's form ("DeepSeek-V3.2", arXiv 2512.02556, section 2.1) attention backends do the picking. The
indexer hands its queries, keys and weights to the attention function in place of indices. Indexers of other forms are
left out, and texts are refused that are longer than what they pick.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from slotline.registry.contracts.attention import INDEX_INPUTS, AttentionLayer, LayerInput
from slotline.registry.errors import ModelError

INDEXER = "indexer"

ROTATIONS: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV32Indexer": "apply_rotary_pos_emb",
        "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave",
    }
)
"""Class of an indexer of DeepSeek's form -> the function in its module that rotates queries and keys by positions."""


def longest_dense(hf_model: Any) -> int | None:
    """Return the longest text in which every key is picked, or None for a model without an index that is left out.

    Raises:
        ModelError: if an index does not say how many keys it picks.
    """
    sizes = [_picked(module.indexer) for module in hf_model.modules() if _has_index(module) and not _hands_on(module)]
    return min(sizes) if sizes else None


def adopt(hf_model: Any) -> Any:
    """Return the model, whose indexers hand on what backends read, or pick nothing where backends do not know them."""
    for module in hf_model.modules():
        if _has_index(module):
            known = type(module.indexer).__name__ in ROTATIONS
            module.indexer.forward = partial(_inputs, module.indexer) if known else _picking_nothing
        if _has_index(module) or hasattr(module, "skip_topk"):
            module.forward = _with_mask(module.forward)
    return hf_model


def inputs_of(module: Any, handed: Any) -> tuple[LayerInput, ...]:
    """Return the declared inputs of an attention module that gets `handed` from its own indexer."""
    if not isinstance(handed, dict) or not _has_index(module):
        return ()
    dtypes = dict.fromkeys(INDEX_INPUTS, "") | {"index_weight": "float32"}
    return tuple(LayerInput(name, tuple(handed[name].shape[2:]), dtypes[name]) for name in INDEX_INPUTS)


def settle(hf_model: Any, max_model_len: int, layers: tuple[AttentionLayer, ...] = ()) -> None:
    """Let indexers compute nothing in `layers` without an index, and refuse texts in which one is missing.

    Raises:
        ModelError: if `max_model_len` allows texts in which an index that is left out would leave keys out.
    """
    for layer in layers:
        module = hf_model.get_submodule(layer.name.partition("#")[0])
        if layer.index_topk is None and _has_index(module):
            module.indexer.forward = _picking_nothing
    longest = longest_dense(hf_model)
    if longest is not None and max_model_len > longest:
        raise ModelError(
            f"{type(hf_model).__name__} picks {longest} keys by an index in longer texts, which this version does not "
            f"serve; max_model_len is {max_model_len}",
            fix=f"set scheduler.max_model_len = {longest} or less",
        )


def _has_index(module: Any) -> bool:
    return isinstance(getattr(module, INDEXER, None), nn.Module)


def _hands_on(module: Any) -> bool:
    """Return True if a module's indexer leaves the picking to backends."""
    return getattr(module.indexer.forward, "func", None) is _inputs


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


def _inputs(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    *_: Any,
    **__: Any,
) -> dict[str, torch.Tensor]:
    """Return a layer's inputs of these names, each [1, num_tokens, ...], in place of indices.

    The scale of the products, which are never negative, is in the weights: head_dim**-0.5 beside n_heads**-0.5.
    """
    cos, sin = position_embeddings
    rotary, rest = indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim
    query = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    query_rot, query_pass = query.split((rotary, rest), dim=-1)
    key_rot, key_pass = key.split((rotary, rest), dim=-1)
    rotate = getattr(sys.modules[type(indexer).__module__], ROTATIONS[type(indexer).__name__])
    query_rot, key_rot = rotate(query_rot, key_rot, cos, sin, unsqueeze_dim=2)
    weight = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    return {
        "index_query": torch.cat((query_rot, query_pass), dim=-1),
        "index_key": torch.cat((key_rot, key_pass), dim=-1).squeeze(2),
        "index_weight": weight * (indexer.n_heads * indexer.head_dim) ** -0.5,
    }


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
