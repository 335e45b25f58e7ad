"""Decoder layers as straight calls: norm, attention, output projection plus residual, norm, MLP plus residual.

For layers of an attention with the short forward and a fused MLP. The residuals are added inside neighbouring
operations, and the children's forwards are called without torch's module machinery, which matters when a layer of a
decode step takes half a millisecond. A layer is changed only if it gives the original's output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from slotline.plugins.model_families.passes.attention_probe import Recorder, probe, recording, same
from slotline.plugins.model_families.passes.between_attentions import FEWEST_ROWS, MOST_ROWS
from slotline.plugins.model_families.passes.gated_mlp import FusedGatedMLP
from slotline.plugins.model_families.passes.kernels import FusedKernels
from slotline.plugins.model_families.passes.layer_link import LayerLink, Projected, is_plain
from slotline.plugins.model_families.passes.lean_attention import CACHES, LeanForward, has_cache
from slotline.plugins.model_families.passes.lean_mlp import LeanMLP
from slotline.plugins.model_families.passes.packed_linear import has_hooks
from slotline.plugins.model_families.passes.residuals import Residuals, residuals_of
from slotline.plugins.model_families.passes.rms_norm import KernelRMSNorm, is_kernel_norm
from slotline.plugins.model_families.passes.target import Target
from slotline.plugins.model_families.tensor_parallel.token_division import WHOLE, TokenDivision, only_gathers

if TYPE_CHECKING:
    from slotline.plugins.model_families.passes.layer_tail import LayerTail

KNOWN = CACHES | {"attention_mask", "position_ids", "use_cache", "position_embeddings"}
"""The arguments that the short forward understands; a mask and a cache only as None."""


class Norms(NamedTuple):
    """The names of a layer's norms, None where it has none: before and after attention, before and after the MLP."""

    before: str | None
    after: str | None
    before_mlp: str | None
    after_mlp: str | None


def norms_of(layer: nn.Module, residuals: Residuals) -> Norms:
    """Return the norms of a layer by transformers' names. Their effect is checked when the layer is tried."""
    if residuals.norms_branches and "post_feedforward_layernorm" in layer._modules:  # Gemma 2 and 3; OLMo 2
        names = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        return Norms(*(name if name in layer._modules else None for name in names))
    return Norms("input_layernorm", None, "post_attention_layernorm", None)


class LeanLayer:
    """The short forward of one decoder layer.

    Attributes:
        tokens: division of a step's tokens among ranks. Where they are divided, all but attention and the products of
            the MLP work on a rank's own.
        norms: the names of the layer's norms.
        tail: all that is behind attention as one call for few tokens, see `layer_tail`. None without it.
        link: to the next layer, if one kernel may compute all up to its attention.
    """

    tokens: TokenDivision = WHOLE
    tail: LayerTail | None = None
    link: LayerLink | None = None

    def __init__(self, layer: nn.Module, norms: Norms, residuals: Residuals) -> None:
        self._layer: Any = layer
        self.norms, self._residuals = norms, residuals
        self._original: Callable[..., Any] = layer.forward

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Compute the original's result: [batch, num_tokens, hidden_size] to the same."""
        # Families differ in the order of their parameters, so what is not passed by name goes to the original.
        if not args and options.keys() <= KNOWN and "position_embeddings" in options and self._is_lean():
            positions = options.get("position_ids")
            passed = {} if positions is None else {"position_ids": positions}
            if options.get("attention_mask") is None and not has_cache(options):
                found = self._run(hidden_states, options["position_embeddings"], passed)
                if found is not None:
                    return found[0]
        return self._original(hidden_states, *args, **options)

    @property
    def entrance(self) -> KernelRMSNorm | None:
        """The norm that this layer begins with, if the layer in front may compute it."""
        norm = None if self.norms.before is None else self._layer._modules.get(self.norms.before)
        return norm if is_kernel_norm(norm) else None

    def chain(
        self,
        hidden_states: torch.Tensor,
        embeddings: Any,
        normed: torch.Tensor | Projected | None,
        behind: nn.Module | None,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | Projected | None] | None:
        """Return the layer's output [batch, n, hidden_size], and what the next layer begins with if that costs nothing.

        That is its norm by `behind`, or even its merged projection.

        Args:
            hidden_states: [batch, num_tokens, hidden_size]. May be overwritten.
            embeddings: cosines and sines.
            normed: the hidden states after `entrance`, or their merged projection, if already computed.
            behind: the norm after the layer, if it is known.
            wanted: [n] int64, the only tokens that continue, and that attend if attention supports it. None for all.

        Returns:
            None if the original must be called, or the layer has hooks.
        """
        layer = self._layer
        if layer._forward_hooks or layer._forward_pre_hooks or not self._is_lean():
            return None
        behind = behind if is_kernel_norm(behind) else None
        return self._run(hidden_states, embeddings, {}, normed, behind, wanted, owned=True)

    @property
    def is_plain(self) -> bool:
        """True if it has a norm before attention, one before the MLP, and no other."""
        return is_plain(self.norms)

    def _is_lean(self) -> bool:
        return is_lean(self._layer, self.norms, self._residuals)

    def _run(
        self,
        hidden_states: torch.Tensor,
        embeddings: Any,
        options: dict[str, Any],
        normed: torch.Tensor | Projected | None = None,
        behind: KernelRMSNorm | None = None,
        wanted: torch.Tensor | None = None,
        *,
        owned: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | Projected | None] | None:
        children, residuals, tokens = self._layer._modules, self._residuals, self.tokens
        attention = children["self_attn"]
        before, before_mlp = (None if name is None else children[name] for name in (self.norms[0], self.norms[2]))
        attending = wanted if wanted is not None and attention.forward.takes_wanted() else None
        if isinstance(normed, Projected):
            attended = attention.forward.attended(hidden_states, embeddings, options, None, attending, qkv=normed.qkv)
        elif normed is None and not tokens.divided and residuals.keeps(hidden_states):
            attended = attention.forward.attended(hidden_states, embeddings, options, before, attending)
        else:
            if normed is None:
                normed = hidden_states if before is None else before.forward(hidden_states)
            attended = attention.forward.attended(tokens.whole(normed), embeddings, options, None, attending)
        if attended is None:
            return None
        mixed = attended[0]
        if wanted is None and self.link is not None and behind is self.link.norm and not tokens.divides:
            joined = self.link(mixed, hidden_states)
            if joined is not None:
                return joined
        if wanted is not None:
            mixed = mixed if attending is not None else mixed[:, wanted]
            hidden_states = tokens.some(hidden_states, wanted)
        elif self.tail is not None and not tokens.divided and self.tail.serves(self._layer, before_mlp):
            found = self.tail(mixed, hidden_states, behind)
            if found is not None:
                return found
        return self.behind_attention(mixed, hidden_states, behind, owned=owned)

    def behind_attention(
        self, mixed: torch.Tensor, hidden_states: torch.Tensor, behind: KernelRMSNorm | None, *, owned: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output, and its norm by `behind` if that costs nothing, by separate calls.

        Args:
            mixed: [batch, num_tokens, in_features of the output projection], what attention gave.
            hidden_states: [batch, num_tokens, hidden_size], the layer's input. May be overwritten where `owned`.
        """
        children, residuals, tokens = self._layer._modules, self._residuals, self.tokens
        _, after, before_mlp, after_mlp = [None if name is None else children[name] for name in self.norms]
        mlp, o_proj = children["mlp"], children["self_attn"]._modules["o_proj"]
        gated_mlp = gated_of(mlp)
        normed = None
        in_place = residuals.keeps(hidden_states) or (owned and residuals.overwrites(hidden_states))
        if after is None and in_place and not tokens.divided:
            hidden_states = residuals.add(o_proj, mixed, hidden_states, None)
            gated = gated_mlp(hidden_states, before_mlp)  # type: ignore[misc]
        else:
            hidden_states, normed = residuals.add_and_norm(o_proj, mixed, hidden_states, after, before_mlp)
            gated = gated_mlp(tokens.whole(normed))  # type: ignore[misc]
        if gated is None:  # its projections were replaced
            if normed is None:
                normed = hidden_states if before_mlp is None else before_mlp.forward(hidden_states)
            branch = mlp(normed)
            return hidden_states + (branch if after_mlp is None else after_mlp(branch)), None
        down = mlp._modules["down_proj"]
        if behind is None or not residuals.norms_behind(hidden_states):
            return residuals.add(down, gated, hidden_states, after_mlp), None
        return residuals.add_and_norm(down, gated, hidden_states, after_mlp, behind)


def gated_of(mlp: nn.Module | None) -> Callable[..., torch.Tensor | None] | None:
    """Return the function that computes the input of an MLP's down projection, if the MLP is one of the passes'."""
    if type(mlp) is FusedGatedMLP:
        return mlp.gated
    forward = None if mlp is None else mlp.__dict__.get("forward")
    return forward.gated if type(forward) is LeanMLP else None


def is_lean(layer: nn.Module, norms: Norms, residuals: Residuals) -> bool:
    """Return True if the layer's parts come from the passes, were not replaced, and attention and MLP have no hooks."""
    children = layer._modules
    attention, mlp = children.get("self_attn"), children.get("mlp")
    if gated_of(mlp) is None or attention is None or type(attention.__dict__.get("forward")) is not LeanForward:
        return False
    for name in norms:
        if name is not None and not is_kernel_norm(children.get(name)):
            return False
    if not only_gathers(attention) or not only_gathers(mlp):  # type: ignore[arg-type]
        return False
    for linear in (attention._modules.get("o_proj"), mlp._modules.get("down_proj")):  # type: ignore[union-attr]
        if type(linear) is not residuals.linear:
            return False
    return True


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Shorten the forward of every decoder layer for which the short one is equal."""
    rotary = getattr(getattr(model, "base_model", None), "rotary_emb", None)
    residuals = residuals_of(target)
    if residuals is None or rotary is None:
        return ()
    count = 0
    with recording(model) as recorder:
        for layer in list(model.modules()):
            norms = norms_of(layer, residuals)
            if has_hooks(layer) or not is_lean(layer, norms, residuals):
                continue
            lean = LeanLayer(layer, norms, residuals)
            if target.decisions.decide(partial(_is_equal, layer, lean, rotary, recorder, target)):
                layer.forward = lean
                count += 1
    if count == 0:
        return ()
    notes = (f"straight calls with residuals added inside the products in {count} layers",)
    return notes if target.fused is None else notes + _link(model, target, target.fused)


def _link(model: nn.Module, target: Target, fused: FusedKernels) -> tuple[str, ...]:
    """Link each layer to the one behind it if one kernel may compute what is between their attentions."""
    count = 0
    layers = list(getattr(model.base_model, "layers", ()))
    for layer, behind in itertools.pairwise(layers):
        if not all(
            type(each.__dict__.get("forward")) is LeanLayer and each.forward.is_plain for each in (layer, behind)
        ):
            continue
        link = LayerLink(layer, behind, fused)
        if target.decisions.decide(link.is_equal if target.joins else lambda: False) and target.joins:
            layer.forward.link = link
            count += 1
    rows = f"{FEWEST_ROWS} to {MOST_ROWS} tokens"
    return (f"one kernel between two attentions after {count} layers, for {rows}",) if count else ()


def _is_equal(layer: Any, lean: LeanLayer, rotary: Any, recorder: Recorder, target: Target) -> bool:
    """Return True if the short forward of a layer gives its output."""
    hidden, embeddings = probe(layer.self_attn, rotary, target)
    try:
        expected = layer.forward(hidden, position_embeddings=embeddings)
    except (RuntimeError, TypeError, ValueError):
        recorder.calls.clear()
        return False  # takes other arguments than a plain decoder layer
    *states, _ = recorder.calls.pop()
    found = lean(hidden, position_embeddings=embeddings)
    return same((found, None), expected, tuple(states), recorder)
