"""Attention modules with a short forward: one projection, rotary embedding in place, the attention function.

transformers' forward runs some twenty small operations only for the rotary embedding. The short forward keeps the
module and its children, calls the same attention function with the same arguments, and leaves every unknown case (a
cache, a mask, replaced projections) to the original. It is put in place only after both have called a recording
attention function with equal query, key, value and options, and returned equal outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from attrs import astuple, frozen
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slotline.plugins.model_families.binding import slot_attention
from slotline.plugins.model_families.passes.attention_probe import Recorder, probe, recording, same
from slotline.plugins.model_families.passes.head_edges import head_edges, norms_of, projected, room_for_scales
from slotline.plugins.model_families.passes.merged_projections import QUERY_KEY_VALUE, PlainMerged, merged_of
from slotline.plugins.model_families.passes.packed_linear import has_hooks
from slotline.plugins.model_families.passes.rms_norm import KernelRMSNorm, is_kernel_norm
from slotline.plugins.model_families.passes.target import Target
from slotline.registry.contracts.attention import CacheSlots
from slotline.registry.contracts.attention_edges import AttentionEdges
from slotline.registry.loading import one_line

SPLIT_ROWS = 1024
"""Up to so many rows two products take longer than one whose queries mostly nobody reads."""

CACHES = frozenset({"past_key_values", "cache"})
"""What transformers calls its own cache, before release 5.24 and since."""


def has_cache(options: Mapping[str, Any]) -> bool:
    """Return True if a module of transformers is called with a cache of its own."""
    return any(options.get(name) is not None for name in CACHES)


@frozen
class Heads:
    """Division of a merged projection's output.

    Attributes:
        query, key: number of heads.
        size: elements of one head.
        rotary_size: number of rotated elements of a head.
    """

    query: int
    key: int
    size: int
    rotary_size: int


class LeanForward:
    """The short forward of one attention module."""

    def __init__(self, module: nn.Module, heads: Heads, options: dict[str, Any], target: Target) -> None:
        assert target.kernels is not None
        self._heads, self._options = heads, options
        self._module: Any = module
        self._original: Callable[..., Any] = module.forward
        self._rotate, self._fused = target.kernels.rotate, target.fused

    @classmethod
    def of(cls, facts: Mapping[str, Any], module: nn.Module, target: Target) -> LeanForward:
        """Return the short forward that `facts` of another one describe."""
        options = {name: _value(module, value) for name, value in facts["options"].items()}
        return cls(module, Heads(*facts["heads"]), options, target)

    @property
    def facts(self) -> dict[str, Any]:
        """What describes this forward without a tensor: the heads and the options, parameters of the module by name."""
        names = {id(parameter): {"parameter": name} for name, parameter in self._module.named_parameters()}
        options = {name: names.get(id(value), value) for name, value in self._options.items()}
        return {"heads": astuple(self._heads), "options": options}

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Compute the original's result from hidden_states [batch, num_tokens, hidden_size], cos and sin [.., size]."""
        if attention_mask is None and not has_cache(options) and all(arg is None for arg in args):
            others = {name: value for name, value in options.items() if name not in CACHES}
            scales = room_for_scales(self._module, hidden_states) if self._by_slot() else None
            attended = self.attended(hidden_states, position_embeddings, others, scales=scales)
            if attended is not None:
                return projected(self._module, attended[0], scales), attended[1]
        if args:
            return self._original(hidden_states, position_embeddings, attention_mask, *args, **options)
        options |= {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
        return self._original(hidden_states, **options)  # by name, since their order is not the same everywhere

    def attended(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        others: dict[str, Any],
        norm: KernelRMSNorm | None = None,
        wanted: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        qkv: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any] | None:
        """Return the input of the output projection, [batch, num_tokens, heads * size], and attention's second result.

        The first is int8 if there was room for `scales` [num_tokens, groups] float32 and they were written. A given
        norm is applied to the hidden states first. `qkv` is their merged projection, if it is already there. With
        `wanted` [n] int64, which `takes_wanted` must allow, only these tokens attend: [batch, n, heads * size]. None if
        the original must be called.
        """
        if not isinstance(position_embeddings, tuple):
            return None  # a layer without positions
        module, (cos, sin) = self._module, position_embeddings
        merged = merged_of(module, "qkv_proj", QUERY_KEY_VALUE) if qkv is None else None
        attend = ALL_ATTENTION_FUNCTIONS.get(module.config._attn_implementation)
        fits = cos.shape[:-1] == hidden_states.shape[:-1]
        fits &= self._fused is not None or cos.dtype == hidden_states.dtype
        if not fits or (merged is None and qkv is None) or attend is None:
            return None
        if merged is None:
            assert qkv is not None  # from the kernel of the layer in front
        elif (
            wanted is not None
            and norm is None
            and isinstance(merged, PlainMerged)
            and self._splits(merged, hidden_states)
        ):
            qkv = self._split_product(merged, hidden_states, wanted)
        else:
            qkv = merged(hidden_states) if norm is None else self._of_norm(merged, hidden_states, norm)
        edges = None if wanted is not None else self._edges(attend, cos, sin, scales)
        if edges is not None:
            heads, tokens = self._heads, qkv.shape[1]
            states = qkv.view(tokens, -1, heads.size)  # few operations on tensors, each of which costs microseconds
            values = states.shape[1] - heads.query - heads.key
            query, key, value = states.split_with_sizes((heads.query, heads.key, values), 1)
            sinks = self._options.get("s_aux") if not others else (self._options | others).get("s_aux")
            slot = module.slotline_slot
            return slot.attend(query, key, value, sinks, written=True, edges=edges).reshape(1, tokens, -1), None
        slots = self._slots(attend, qkv)
        query, key, value = self._turned(qkv, cos.contiguous(), sin.contiguous(), slots)
        if wanted is not None:
            query = query[:, wanted]
        options = self._options | others if others else self._options
        if attend is slot_attention and (slot := module.slotline_slot).is_plain():
            said = {name: True for name, is_so in (("written", slots), ("wanted", wanted)) if is_so is not None}
            return slot.attend(query[0], key[0], value[0], options.get("s_aux"), **said).flatten(1)[None], None
        out, weights = attend(module, *(states.transpose(1, 2) for states in (query, key, value)), None, **options)
        return out.flatten(2), weights

    def projection(self) -> nn.Linear | PlainMerged | None:
        """Return the merged projection if another kernel may compute it."""
        merged = merged_of(self._module, "qkv_proj", QUERY_KEY_VALUE)
        return merged if type(merged) in (nn.Linear, PlainMerged) and not has_hooks(merged) else None  # type: ignore

    def takes_wanted(self) -> bool:
        """Return True if only the wanted tokens may attend in this step."""
        attend = ALL_ATTENTION_FUNCTIONS.get(self._module.config._attn_implementation)
        return attend is slot_attention and self._module.slotline_slot.takes_wanted()

    def _splits(self, merged: PlainMerged, hidden_states: torch.Tensor) -> bool:
        """Return True if a separate product for queries is faster, and the projection has no hooks."""
        many = hidden_states.shape[:-1].numel() > SPLIT_ROWS
        return many and self._fused is not None and not has_hooks(merged)

    def _split_product(self, merged: PlainMerged, hidden_states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the merged projection with queries of only the `wanted` tokens. The other queries are undefined.

        The layout is the usual one, so that the same kernel rotates and stores them.
        """
        weight, bias, end = merged.weight, merged.bias, self._heads.query * self._heads.size
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        qkv = rows.new_empty((len(rows), len(weight)))
        if bias is None:
            torch.mm(rows, weight[end:].t(), out=qkv[:, end:])
        else:
            torch.addmm(bias[end:], rows, weight[end:].t(), out=qkv[:, end:])
        qkv[wanted, :end] = functional.linear(rows[wanted], weight[:end], None if bias is None else bias[:end])
        return qkv.view(*hidden_states.shape[:-1], -1)

    def _of_norm(self, merged: Any, hidden_states: torch.Tensor, norm: KernelRMSNorm) -> torch.Tensor:
        """Return the merged projection of normed hidden states, in one kernel if the projection has no hooks."""
        if self._fused is None or has_hooks(merged):
            return merged(norm.forward(hidden_states))  # type: ignore[no-any-return]
        return self._fused.linear(hidden_states, merged.weight, merged.bias, norm.factors)

    def _slots(self, attend: Any, qkv: torch.Tensor) -> CacheSlots | None:
        """Return the cache places where the rotating kernel may store keys and values in this step, if any."""
        if self._fused is None or attend is not slot_attention or not self._one_kernel():
            return None
        if not self._module.slotline_slot.is_plain():
            return None
        slots: CacheSlots | None = self._module.slotline_slot.slots(qkv)
        return slots if slots is not None and slots.slot_mapping.numel() == qkv.shape[:-1].numel() else None

    def _by_slot(self) -> bool:
        """Return True if attention is the slot's, not one that a check has put in its place."""
        return ALL_ATTENTION_FUNCTIONS.get(self._module.config._attn_implementation) is slot_attention

    def _edges(
        self, attend: Any, cos: torch.Tensor, sin: torch.Tensor, scales: torch.Tensor | None
    ) -> AttentionEdges | None:
        """Return what the layer's backend norms and rotates in this step, None if it leaves that to the model."""
        if attend is not slot_attention:
            return None
        slot = self._module.slotline_slot
        if not (taken := slot.edges()) or not slot.is_plain():
            return None
        heads = self._heads
        return head_edges(taken, self._norms(), (cos, sin), heads.size, heads.rotary_size, scales=scales)

    def _one_kernel(self) -> bool:
        """Return True if queries and keys are rotated in one call, normed by head or not at all."""
        query_norm, key_norm = self._norms()
        return query_norm is None or (self._fused is not None and self._fuses(query_norm, key_norm))

    def _norms(self) -> tuple[Any, Any]:
        return norms_of(self._module)

    def _turned(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: CacheSlots | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated query, key, value [batch, num_tokens, heads, size] of qkv [.., .., all heads * size]."""
        heads, (query_norm, key_norm) = self._heads, self._norms()
        if self._one_kernel():
            states = qkv.view(*qkv.shape[:-1], -1, heads.size)  # [batch, num_tokens, all heads, size]
            cut = heads.query + heads.key
            if self._fused is None:
                self._rotate(states, cut, cos, sin, heads.rotary_size)
            else:
                first = None if query_norm is None else query_norm.factors
                second = None if key_norm is None else key_norm.factors
                self._fused.rotate_and_store(
                    states, first, second, heads.query, heads.key, cos, sin, heads.rotary_size, slots
                )
            return self._parts(qkv)
        return self._turned_apart(qkv, query_norm, key_norm, cos, sin)

    def _parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """View qkv [.., .., all heads * size] as query, key and value [batch, num_tokens, heads, size]."""
        heads, states = self._heads, qkv.view(*qkv.shape[:-1], -1, self._heads.size)
        cut = heads.query + heads.key
        return states[:, :, : heads.query], states[:, :, heads.query : cut], states[:, :, cut:]

    def _fuses(self, query_norm: Any, key_norm: Any) -> bool:
        """Return True if one kernel can norm and rotate each head."""
        if not (is_kernel_norm(query_norm) and is_kernel_norm(key_norm)):
            return False
        size = self._heads.size
        if query_norm.weight.numel() != size or key_norm.weight.numel() != size:
            return False
        return query_norm.eps == key_norm.eps and query_norm.offset == key_norm.offset

    def _turned_apart(
        self, qkv: torch.Tensor, query_norm: Any, key_norm: Any, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key, value [batch, num_tokens, heads, size], each normed and rotated separately."""
        heads = self._heads
        query_end, key_end = heads.query * heads.size, (heads.query + heads.key) * heads.size
        query = self._normed(qkv[..., :query_end], query_norm)
        key = self._normed(qkv[..., query_end:key_end], key_norm)
        value = qkv[..., key_end:]
        self._rotate(query, heads.query, cos, sin, heads.rotary_size)
        self._rotate(key, heads.key, cos, sin, heads.rotary_size)
        return query, key, value.view(*value.shape[:-1], -1, heads.size)

    def _normed(self, states: torch.Tensor, norm: Any) -> torch.Tensor:
        """Norm per head or over all heads, by the norm's weight: [batch, num_tokens, heads, size] contiguous."""
        by_head = states.view(*states.shape[:-1], -1, self._heads.size)
        weight = norm._parameters.get("weight")  # a norm may have none (NanoChat), and is then one of each head
        if weight is None or weight.numel() == self._heads.size:
            return norm(by_head).contiguous()  # type: ignore[no-any-return]
        return norm(states).view(by_head.shape).contiguous()  # type: ignore[no-any-return]


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Shorten the forward of every attention module for which the short one is equal."""
    rotary = getattr(getattr(model, "base_model", None), "rotary_emb", None)
    if target.kernels is None or rotary is None:
        return ()
    count, failures = 0, dict[str, int]()
    with recording(model) as recorder:
        for module in list(model.modules()):
            if merged_of(module, "qkv_proj", QUERY_KEY_VALUE) is None:
                continue
            try:
                lean = _lean_forward(module, rotary, recorder, target)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a module of another kind than a decoder's attention may raise anything
                if target.decisions.known:
                    raise
                recorder.calls.clear()
                failures[one_line(error)] = failures.get(one_line(error), 0) + 1
                continue
            if lean is not None:
                module.forward = lean
                count += 1
    shortened = (f"short forward with rotary embedding in place in {count} attention modules",) if count else ()
    return shortened + tuple(
        f"{number} attention modules keep their own forward: {why}" for why, number in failures.items()
    )


def _value(module: nn.Module, value: Any) -> Any:
    """Return an option of attention, which may be described by a parameter's name."""
    return module.get_parameter(value["parameter"]) if isinstance(value, dict) else value


def _lean_forward(module: Any, rotary: Any, recorder: Recorder, target: Target) -> LeanForward | None:
    if has_hooks(module) or not all(hasattr(module, name) for name in ("o_proj", "head_dim", "config")):
        return None
    facts = target.decisions.decide(partial(_facts, module, rotary, recorder, target))
    return None if facts is None else LeanForward.of(facts, module, target)


def _facts(module: Any, rotary: Any, recorder: Recorder, target: Target) -> dict[str, Any] | None:
    """Return the facts of the short forward that gives the module's own output, or None."""
    hidden, embeddings = probe(module, rotary, target)
    if not isinstance(embeddings, tuple):
        return None  # not cosines and sines: Llama 4 turns by complex numbers
    expected, _ = module.forward(hidden, position_embeddings=embeddings, attention_mask=None)
    query, key, value, options = recorder.calls.pop()
    for rotary_size in (embeddings[0].shape[-1], 2 * embeddings[0].shape[-1]):
        if rotary_size <= module.head_dim:
            heads = Heads(query.shape[1], key.shape[1], module.head_dim, rotary_size)
            lean = LeanForward(module, heads, options, target)
            if same(lean(hidden, embeddings), expected, (query, key, value), recorder):
                return lean.facts
    return None
