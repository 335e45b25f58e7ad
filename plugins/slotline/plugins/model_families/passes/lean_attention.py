"""Attention modules with a short forward: one projection, rotary embedding in place, the attention function.

transformers' forward makes some twenty small operations for the rotary embedding alone. The short one keeps the module
and its children, calls the same attention function with the same arguments, and hands every case that it does not
know (a cache, a mask, replaced projections) to the original. It is put in place only after both have called a
recording attention function with equal query, key, value and options, and returned equal outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, frozen
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slotline.plugins.model_families.passes.equality import TOLERANCES, relative_difference
from slotline.plugins.model_families.passes.merged_projections import MergedProjection
from slotline.plugins.model_families.passes.packed_linear import PackedLinear, has_hooks
from slotline.plugins.model_families.passes.row_kernels import row_kernels
from slotline.plugins.model_families.passes.target import Target

PROBE_NAME = "slotline_passes_probe"
PROBE_POSITIONS = (1, 17, 300)


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
        module, cos, sin = self._module, *position_embeddings
        merged = merged_of(module)
        attend = ALL_ATTENTION_FUNCTIONS.get(module.config._attn_implementation)
        fits = cos.shape[:-1] == hidden_states.shape[:-1] and cos.dtype == hidden_states.dtype
        if not fits or merged is None or attend is None or attention_mask is not None or past_key_values is not None:
            return self._original(hidden_states, position_embeddings, attention_mask, past_key_values, **others)
        query, key, value = self._turned(merged(hidden_states), cos.contiguous(), sin.contiguous())
        options = self._options | others if others else self._options
        out, weights = attend(module, query, key, value, None, **options)
        return module.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

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


@define
class _Recorder:
    """An attention function that keeps what it was called with."""

    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]]

    def __call__(self, _: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        self.calls.append((query.clone(), key.clone(), value.clone(), options))
        return query.transpose(1, 2), None


def merged_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The module's one projection to query, key and value, if nothing has been put in front of its parts."""
    children = module._modules
    if type(children.get("qkv_proj")) is PackedLinear:
        return children["qkv_proj"]
    query, key, value = (children.get(name) for name in ("q_proj", "k_proj", "v_proj"))
    if not (type(query) is type(key) is type(value) is MergedProjection):
        return None
    return query.shared_linear  # type: ignore[union-attr, no-any-return]


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Shorten the forward of every attention module for which the short one is equal."""
    rotary = getattr(getattr(model, "base_model", None), "rotary_emb", None)
    if not target.has_row_kernels or rotary is None:
        return ()
    count = 0
    with _recording(model) as recorder:
        for module in list(model.modules()):
            lean = _lean_forward(module, rotary, recorder, target) if merged_of(module) else None
            if lean is not None:
                module.forward = lean  # type: ignore[assignment]
                count += 1
    return (f"short forward with rotary embedding in place in {count} attention modules",) if count else ()


@contextmanager
def _recording(model: Any) -> Iterator[_Recorder]:
    recorder, before = _Recorder([]), model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[PROBE_NAME] = recorder
    model.config._attn_implementation = PROBE_NAME
    try:
        yield recorder
    finally:
        model.config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[PROBE_NAME]


def _lean_forward(module: Any, rotary: Any, recorder: _Recorder, target: Target) -> LeanForward | None:
    if has_hooks(module) or not all(hasattr(module, name) for name in ("o_proj", "head_dim", "config")):
        return None
    hidden, embeddings = _probe(module, rotary, target)
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
            if _same(lean(hidden, embeddings), expected, (query, key, value), recorder):
                return lean
    return None


def _probe(module: Any, rotary: Any, target: Target) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    features = module.config.hidden_size
    hidden = torch.randn(1, len(PROBE_POSITIONS), features, generator=torch.Generator().manual_seed(features))
    hidden = hidden.to(target.dtype)
    positions = torch.tensor([PROBE_POSITIONS])  # [1, tokens]
    # A rope type by layer type means that the embedding must be told which (Gemma 3).
    by_type = isinstance(getattr(rotary, "rope_type", None), dict)
    return hidden, rotary(hidden, positions, *((module.layer_type,) if by_type else ()))


def _same(found: Any, expected: torch.Tensor, states: tuple[torch.Tensor, ...], recorder: _Recorder) -> bool:
    *turned, _ = recorder.calls.pop()
    pairs = [(found[0], expected), *zip(turned, states, strict=True)]
    tolerance = TOLERANCES[expected.dtype]
    return all(a.shape == b.shape and relative_difference(a, b) <= tolerance for a, b in pairs)
