"""Edges of attention over heads that a module hands over to its layer's backend."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from slotline.plugins.model_families.passes.packed_linear import has_hooks
from slotline.plugins.model_families.passes.rms_norm import is_kernel_norm
from slotline.plugins.model_families.quantized.slot_linear import SlotLinear
from slotline.registry.contracts.attention_edges import GATE, NORM, ROTARY, ROUNDED, AttentionEdges, HeadNorm


class _Rotation:
    """The last edges of nothing but a rotation, which all layers of a step share."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, torch.Tensor, int, AttentionEdges] | None = None

    def edges(self, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> AttentionEdges:
        """Return edges of cosines and sines [1, num_tokens, width]."""
        last = self._last
        if last is None or last[0] is not cos or last[1] is not sin or last[2] != rotary_size:
            edges = AttentionEdges(cos=cos[0], sin=sin[0], rotary_size=rotary_size)
            last = self._last = cos, sin, rotary_size, edges
        return last[3]


_ROTATION = _Rotation()


def norms_of(module: Any) -> tuple[Any, Any]:
    """Return the norms of an attention module's queries and keys, None where it has none."""
    return module._modules.get("q_norm"), module._modules.get("k_norm")


def head_edges(
    taken: Collection[str],
    norms: tuple[Any, Any],
    embeddings: tuple[torch.Tensor, torch.Tensor],
    size: int,
    rotary_size: int,
    gate: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> AttentionEdges | None:
    """Return what the backend of a layer computes, None if it has to take more than it does.

    Args:
        taken: names of the edges that the backend takes over.
        norms: of queries and keys.
        embeddings: cosines and sines [1, num_tokens, width].
        size: of a head.
        rotary_size: numbers of a head that are rotated.
        gate: [num_tokens, num_heads, size]. It is left out if the backend does not take it.
        scales: of a rounded output, see `room_for_scales`.
    """
    if ROTARY not in taken:
        return None
    if gate is None and scales is None and norms == (None, None):
        return _ROTATION.edges(*embeddings, rotary_size)
    found = [
        HeadNorm(weight=norm.weight, eps=norm.eps, offset=norm.offset)
        for norm in norms
        if is_kernel_norm(norm) and norm.weight.numel() == size and NORM in taken
    ]
    if len(found) != sum(norm is not None for norm in norms):
        return None  # over all heads, or of another kind
    query_norm, key_norm = found or (None, None)
    cos, sin = embeddings
    return AttentionEdges(
        query_norm=query_norm,
        key_norm=key_norm,
        cos=cos[0],
        sin=sin[0],
        rotary_size=rotary_size,
        gate=gate if GATE in taken else None,
        scales=None if gate is not None and GATE not in taken else scales,
    )


def room_for_scales(module: Any, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """Return room [num_tokens, groups] float32 for scales of an attention module's rounded output in this step.

    None if the backend does not round it, or the output projection does not take it rounded.
    """
    projection = module._modules["o_proj"]
    if type(projection) is not SlotLinear or not projection.rounded_groups or has_hooks(projection):
        return None
    if ROUNDED not in module.slotline_slot.edges():
        return None
    return hidden_states.new_empty((hidden_states.shape[1], projection.rounded_groups), dtype=torch.float32)


def projected(module: Any, mixed: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return the output projection of an attention module, of an output that may be rounded."""
    out: torch.Tensor
    if scales is not None and mixed.dtype == torch.int8:
        out = module.o_proj.forward_rounded(mixed, scales)
    else:
        out = module.o_proj(mixed)
    return out
