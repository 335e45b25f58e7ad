"""Skip of the last layers for tokens that are not wanted, if those layers read the caches of earlier ones.

The first of these decoder layers drops the other tokens from its inputs. Every later layer drops them from all inputs
except the hidden states: position embeddings, inputs of its own. Keys and values reach attention through the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from slotline.plugins.model_families.binding import AttendHolder
from slotline.registry.contracts.attention import AttentionLayer


def keep_wanted(hf_model: Any, layers: Sequence[AttentionLayer], holder: AttendHolder) -> None:
    """Let the decoder layers after the last one that owns a cache run only for the holder's `kept` tokens.

    Without `kept` they run as ever.
    """
    trailing = tuple(takewhile(lambda layer: layer.shares_kv_with is not None, reversed(layers)))
    readers, owners = _names(trailing), _names(layers[: len(layers) - len(trailing)])
    if not readers:
        return
    base, names = hf_model.base_model, {module: name for name, module in hf_model.named_modules()}
    last = max(n for n, layer in enumerate(base.layers) if owners & {names[module] for module in layer.modules()})
    for number, layer in enumerate(base.layers[last + 1 :]):
        layer.forward = _keeping(layer.forward, holder, first=number == 0)


def _names(layers: Sequence[AttentionLayer]) -> set[str]:
    return {layer.name.partition("#")[0] for layer in layers}


def _keeping(forward: Callable[..., Any], holder: AttendHolder, *, first: bool) -> Callable[..., Any]:
    def kept_forward(hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        kept = holder.kept
        if kept is None:
            return forward(hidden_states, *args, **options)
        if first:
            hidden_states = _of_tokens(hidden_states, kept)
        if not len(kept):
            return hidden_states
        args, options = tree_map_only(torch.Tensor, lambda tensor: _of_tokens(tensor, kept), (args, options))
        return forward(hidden_states, *args, **options)

    return kept_forward


def _of_tokens(tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return some tokens of position ids [1, num_tokens], or of states [..., num_tokens, size]."""
    return tensor.index_select(-1 if tensor.ndim == 2 else -2, kept)
