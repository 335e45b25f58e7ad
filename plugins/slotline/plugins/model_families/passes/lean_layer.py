"""Decoder layers as straight calls: norm, attention, output projection plus residual, norm, MLP plus residual.

For layers of two norms, an attention with the short forward and a fused MLP. The residuals are added inside the matrix
products, and the children's forwards are called without torch's module machinery, which matters when a layer of a
decode step takes half a millisecond. A layer is changed only if it gives the original's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slotline.plugins.model_families.passes.attention_probe import Recorder, probe, recording, same
from slotline.plugins.model_families.passes.gated_mlp import FusedGatedMLP
from slotline.plugins.model_families.passes.lean_attention import LeanForward
from slotline.plugins.model_families.passes.packed_linear import has_hooks, is_untouched
from slotline.plugins.model_families.passes.rms_norm import KernelRMSNorm
from slotline.plugins.model_families.passes.target import Target

NORMS = ("input_layernorm", "post_attention_layernorm")


class LeanLayer:
    """The short forward of one decoder layer."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer: Any = layer
        self._original: Callable[..., Any] = layer.forward

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        **others: Any,
    ) -> Any:
        """As the original: [batch, num_tokens, hidden_size] to the same."""
        if attention_mask is None and past_key_values is None and not others and is_lean(self._layer):
            options = {} if position_ids is None else {"position_ids": position_ids}
            found = self._run(hidden_states, position_embeddings, options)
            if found is not None:
                return found
        return self._original(
            hidden_states, attention_mask, position_ids, past_key_values, use_cache, position_embeddings, **others
        )

    def narrow(self, hidden_states: torch.Tensor, embeddings: Any, wanted: torch.Tensor) -> torch.Tensor | None:
        """The layer's output [batch, n, hidden_size] for the `wanted` [n] tokens: all attend, these alone go on.

        None if this is a case for the original.
        """
        return self._run(hidden_states, embeddings, {}, wanted) if is_lean(self._layer) else None

    def _run(
        self, hidden_states: torch.Tensor, embeddings: Any, options: dict[str, Any], wanted: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        children = self._layer._modules
        attention, mlp = children["self_attn"], children["mlp"]
        attended = attention.forward.attended(children[NORMS[0]].forward(hidden_states), embeddings, options)
        if attended is None:
            return None
        mixed = attended[0]
        if wanted is not None:
            mixed, hidden_states = mixed[:, wanted], hidden_states[:, wanted]
        hidden_states = attention._modules["o_proj"].plus(mixed, hidden_states)
        gated = mlp.gated(children[NORMS[1]].forward(hidden_states))
        return mlp._modules["down_proj"].plus(gated, hidden_states)  # type: ignore[no-any-return]


def is_lean(layer: nn.Module) -> bool:
    """Whether the layer's parts are those of the passes, with nothing put in front of them or listening to them."""
    children = layer._modules
    attention, mlp = children.get("self_attn"), children.get("mlp")
    if (
        attention is None
        or type(mlp) is not FusedGatedMLP
        or type(attention.__dict__.get("forward")) is not LeanForward
    ):
        return False
    parts = (attention, mlp, *(children.get(name) for name in NORMS))
    if type(parts[2]) is not KernelRMSNorm or type(parts[3]) is not KernelRMSNorm:
        return False
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts):  # type: ignore[union-attr]
        return False
    return is_untouched(attention._modules.get("o_proj")) and is_untouched(mlp._modules.get("down_proj"))


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Shorten the forward of every decoder layer for which the short one is equal."""
    rotary = getattr(getattr(model, "base_model", None), "rotary_emb", None)
    if not target.packs or rotary is None:
        return ()
    count = 0
    with recording(model) as recorder:
        for layer in list(model.modules()):
            lean = _lean_layer(layer, rotary, recorder, target) if is_lean(layer) and not has_hooks(layer) else None
            if lean is not None:
                layer.forward = lean
                count += 1
    return (f"straight calls with residuals added inside the products in {count} layers",) if count else ()


def _lean_layer(layer: Any, rotary: Any, recorder: Recorder, target: Target) -> LeanLayer | None:
    hidden, embeddings = probe(layer.self_attn, rotary, target)
    try:
        expected = layer.forward(hidden, position_embeddings=embeddings)
    except (RuntimeError, TypeError, ValueError):
        recorder.calls.clear()
        return None  # takes other arguments than a plain decoder layer
    *states, _ = recorder.calls.pop()
    lean = LeanLayer(layer)
    found = lean(hidden, position_embeddings=embeddings)
    return lean if same((found, None), expected, tuple(states), recorder) else None
