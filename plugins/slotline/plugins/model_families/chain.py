"""Decoder layers one after the other, each adding its residual in the kernel that norms the next one's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from slotline.plugins.model_families.tensor_parallel.token_division import WHOLE, TokenDivision

if TYPE_CHECKING:
    from slotline.registry.contracts.model_family import Tap


def run_layers(
    layers: Sequence[Any],
    embeddings: Sequence[Any],
    hidden_states: torch.Tensor,
    norm: Any = None,
    wanted: torch.Tensor | None = None,
    tap: Tap | None = None,
    first: int = 0,
    tokens: TokenDivision = WHOLE,
) -> torch.Tensor:
    """Run decoder layers, and the norm after the last one.

    A layer whose forward has a `chain` (see `passes.lean_layer.LeanLayer`) takes its normed input and returns the next
    layer's. Other layers are called unchanged.

    Args:
        layers: decoder layers of transformers.
        embeddings: the position embeddings of each.
        hidden_states: [1, num_tokens, hidden_size]. Where `tokens` are divided, a rank's own.
        norm: the model's last norm, None if other layers follow.
        wanted: [n] int64, the tokens to return. None for all. In the last layer only these tokens attend and continue
            after attention, if its forward supports it.
        tap: called as ``tap(index, hidden_states)`` before each layer. The first layer's index is `first`.
        tokens: division of the step's tokens among ranks.

    Returns:
        [1, num_tokens or n, hidden_size].
    """
    norms = [getattr(layer.forward, "entrance", None) for layer in layers[1:]]
    normed: torch.Tensor | None = None
    for index, (layer, embedding, behind) in enumerate(zip(layers, embeddings, [*norms, norm], strict=True), first):
        if tap is not None:
            tap(index, hidden_states[0])
        kept = wanted if layer is layers[-1] else None
        found = None
        if (chain := getattr(layer.forward, "chain", None)) is not None:
            found = chain(hidden_states, embedding, normed, behind, kept)
        if found is None:
            hidden_states, normed = layer(hidden_states, position_embeddings=embedding), None
            hidden_states = hidden_states if kept is None else tokens.some(hidden_states, kept)
        else:
            hidden_states, normed = found
    if norm is not None:
        hidden_states = norm(hidden_states) if normed is None else normed
    return tokens.leave(hidden_states)
