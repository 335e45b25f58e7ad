"""Attention modules with a short forward: one projection, rotary embedding in place, the attention function.

transformers' forward makes some twenty small operations for the rotary embedding alone. The short one keeps the module
and its children, calls the same attention function with the same arguments, and hands every case that it does not
know (a cache, a mask, replaced projections) to the original. It is put in place only after both have called a
recording attention function with equal query, key, value and options, and returned equal outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slotline.plugins.model_families.passes.attention_probe import Recorder, probe, recording, same
from slotline.plugins.model_families.passes.merged_projections import MergedProjection
from slotline.plugins.model_families.passes.packed_linear import PackedLinear, has_hooks
from slotline.plugins.model_families.passes.row_kernels import row_kernels
from slotline.plugins.model_families.passes.target import Target


@frozen
class Heads:
    """How a merged projection's output divides.

    Attributes:
        query, key: number of heads.
        size: elements of one head.
        rotary_size: how many of them turn.
    """

    query: int
    key: int
    size: int
    rotary_size: int


class LeanForward:
    """The short forward of one attention module."""

    def __init__(self, module: nn.Module, heads: Heads, options: dict[str, Any], dtype: torch.dtype) -> None:
        self._heads, self._options = heads, options
        self._module: Any = module
        self._original: Callable[..., Any] = module.forward
        self._rotate = row_kernels(dtype).rotate

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> Any:
        """As the original: hidden_states [batch, num_tokens, hidden_size], cos and sin [batch, num_tokens, size]."""
        if attention_mask is None and past_key_values is None:
            attended = self.attended(hidden_states, position_embeddings, others)
            if attended is not None:
                return self._module.o_proj(attended[0]), attended[1]
        return self._original(hidden_states, position_embeddings, attention_mask, past_key_values, **others)

    def attended(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        others: dict[str, Any],
    ) -> tuple[torch.Tensor, Any] | None:
        """What goes into the output projection, [batch, num_tokens, heads * size], and the attention's second result.

        None if this is a case for the original.
        """
        module, (cos, sin) = self._module, position_embeddings
        merged = merged_of(module)
        attend = ALL_ATTENTION_FUNCTIONS.get(module.config._attn_implementation)
        fits = cos.shape[:-1] == hidden_states.shape[:-1] and cos.dtype == hidden_states.dtype
        if not fits or merged is None or attend is None:
            return None
        query, key, value = self._turned(merged(hidden_states), cos.contiguous(), sin.contiguous())
        options = self._options | others if others else self._options
        out, weights = attend(module, query, key, value, None, **options)
        return out.reshape(*hidden_states.shape[:-1], -1), weights

    def _turned(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key, value [batch, heads, num_tokens, size] of qkv [batch, num_tokens, all heads * size]."""
        heads, norms = self._heads, self._module._modules
        cut = heads.query + heads.key
        if "q_norm" not in norms:
            states = qkv.view(*qkv.shape[:-1], -1, heads.size)  # [batch, num_tokens, all heads, size]
            self._turn(states, cut, cos, sin)
            query, key = states[:, :, : heads.query], states[:, :, heads.query : cut]
            return query.transpose(1, 2), key.transpose(1, 2), states[:, :, cut:].transpose(1, 2)
        query_end, key_end = heads.query * heads.size, cut * heads.size
        query = self._normed(qkv[..., :query_end], norms["q_norm"])
        key = self._normed(qkv[..., query_end:key_end], norms["k_norm"])
        value = qkv[..., key_end:]
        self._turn(query, heads.query, cos, sin)
        self._turn(key, heads.key, cos, sin)
        value = value.view(*value.shape[:-1], -1, heads.size)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _normed(self, states: torch.Tensor, norm: Any) -> torch.Tensor:
        """Normed per head or over all heads, as the norm's weight says: [batch, num_tokens, heads, size] contiguous."""
        by_head = states.view(*states.shape[:-1], -1, self._heads.size)
        if norm.weight.numel() == self._heads.size:
            return norm(by_head).contiguous()  # type: ignore[no-any-return]
        return norm(states).view(by_head.shape).contiguous()  # type: ignore[no-any-return]

    def _turn(self, states: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotary embedding of the first `heads` heads of states [batch, num_tokens, >= heads, size], in place."""
        size, width = self._heads.size, cos.shape[-1]
        rows, stride = cos.numel() // width, states.shape[2] * size
        rotary_size = self._heads.rotary_size
        self._rotate(states.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, stride, heads, size, rotary_size, width)


def merged_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The module's one projection to query, key and value, if nothing has been put in front of its parts."""
    children = module._modules
    if type(children.get("qkv_proj")) is PackedLinear:
        return children["qkv_proj"]
    query, key, value = (children.get(name) for name in ("q_proj", "k_proj", "v_proj"))
    if not (type(query) is type(key) is type(value) is MergedProjection):
        return None
    return query.shared_linear


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Shorten the forward of every attention module for which the short one is equal."""
    rotary = getattr(getattr(model, "base_model", None), "rotary_emb", None)
    if not target.has_row_kernels or rotary is None:
        return ()
    count = 0
    with recording(model) as recorder:
        for module in list(model.modules()):
            lean = _lean_forward(module, rotary, recorder, target) if merged_of(module) else None
            if lean is not None:
                module.forward = lean
                count += 1
    return (f"short forward with rotary embedding in place in {count} attention modules",) if count else ()


def _lean_forward(module: Any, rotary: Any, recorder: Recorder, target: Target) -> LeanForward | None:
    if has_hooks(module) or not all(hasattr(module, name) for name in ("o_proj", "head_dim", "config")):
        return None
    hidden, embeddings = probe(module, rotary, target)
    try:
        expected, _ = module.forward(hidden, embeddings, None)
    except (RuntimeError, TypeError, ValueError):
        recorder.calls.clear()
        return None  # takes other arguments than a decoder's attention
    query, key, value, options = recorder.calls.pop()
    for rotary_size in (embeddings[0].shape[-1], 2 * embeddings[0].shape[-1]):
        if rotary_size <= module.head_dim:
            heads = Heads(query.shape[1], key.shape[1], module.head_dim, rotary_size)
            lean = LeanForward(module, heads, options, target.dtype)
            if same(lean(hidden, embeddings), expected, (query, key, value), recorder):
                return lean
    return None
