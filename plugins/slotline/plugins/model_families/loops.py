"""Two loops over the decoder layers: transformers' own forward, and a loop without the parts that we never use.

transformers' forward collects outputs, merges configuration defaults, and plans masks and caches. All of this costs
host time in every step. The lean loop calls the same modules with only position embeddings. It is used only after it
has given the same logits as the whole transformers model on a probe at load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from slotline.plugins.model_families import own_attention, structure
from slotline.plugins.model_families.binding import AttendHolder
from slotline.plugins.model_families.chain import run_layers
from slotline.plugins.model_families.logits import LogitsHead, NoHead, WholeHead
from slotline.plugins.model_families.naming import listed
from slotline.plugins.model_families.stages import Crossing, Part
from slotline.plugins.model_families.state_mixers import output_like
from slotline.plugins.model_families.tensor_parallel.token_division import WHOLE, TokenDivision
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.state import StateLayer
from slotline.registry.errors import ModelError

if TYPE_CHECKING:
    from slotline.registry.contracts.model_family import Tap

Loop = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, "Tap | None"], torch.Tensor]
"""(input_ids, positions, wanted, inputs_embeds, tap) to hidden states. Positions may be [axes, num_tokens]."""

PROBE_TOKENS = 5
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of logits, relative to the largest logit, that counts as the same computation."""


class TransformersLoop:
    """Calls the base model's own forward."""

    def __init__(self, hf_model: Any, crossing: Crossing, tokens: TokenDivision = WHOLE) -> None:
        self._base, self._crossing, self._tokens = hf_model.base_model, crossing, tokens
        divide_within(getattr(self._base, "layers", ()), tokens)
        self._dtype = hf_model.dtype
        self._options = structure.taking(self._base.forward, {"use_cache": False, "return_dict": True})
        self._reads_tokens = bool(getattr(self._base.config, "hidden_size_per_layer_input", None))

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        tap: Tap | None = None,
    ) -> torch.Tensor:
        """Return hidden states [1, n, hidden_size] of input_ids and positions [num_tokens], of the `wanted` [n] tokens.

        `inputs_embeds` [num_tokens, hidden_size] replace the embeddings of input_ids. `tap` is called before each
        layer.
        """
        given = {"position_ids": positions.unsqueeze(-2)} | self._options
        if inputs_embeds is None:
            given["input_ids"] = input_ids.unsqueeze(0)
        else:
            given["inputs_embeds"] = inputs_embeds.unsqueeze(0)
            if self._reads_tokens:  # in each layer, beside the hidden states
                given["per_layer_inputs"] = self._base.get_per_layer_inputs(input_ids.unsqueeze(0))
        divided = self._tokens.step(positions.shape[-1], divided=False)
        with self._crossing.scope(), divided, tapped(self._base.layers, self._tokens.tapping(tap)):
            outputs = self._base(**given)
        hidden_states: torch.Tensor = outputs.last_hidden_state.to(self._dtype)  # Mamba ends in float32
        return hidden_states if wanted is None else hidden_states[:, wanted]


class LeanLoop:
    """Loop that embeds, computes the position embeddings once, runs the layers and norms.

    Modules are looked up in each call. With several parts, hidden states and positions are copied to the next part's
    device, and position embeddings are computed there.
    """

    def __init__(self, hf_model: Any, parts: Sequence[Part], tokens: TokenDivision = WHOLE) -> None:
        self._base, self._parts, self._tokens = hf_model.base_model, tuple(parts), tokens
        # A rope type by layer type means one set of position embeddings for each (Gemma 3).
        by_type = isinstance(getattr(self._base.rotary_emb, "rope_type", None), dict)
        self._layer_types: tuple[str, ...] = tuple(hf_model.config.layer_types) if by_type else ()
        self._multiplier: float | None = getattr(hf_model.config, "embedding_multiplier", None)

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        tap: Tap | None = None,
    ) -> torch.Tensor:
        """Return hidden states [1, n, hidden_size] of input_ids and positions [num_tokens], of the `wanted` [n] tokens.

        `inputs_embeds` [num_tokens, hidden_size] replace the embeddings of input_ids. `tap` is called before each
        layer.
        """
        if self._tokens.divides:
            with self._tokens.step(positions.shape[-1]):
                return self._run(input_ids, positions, wanted, inputs_embeds, self._tokens.tapping(tap))
        return self._run(input_ids, positions, wanted, inputs_embeds, tap)

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        tap: Tap | None,
    ) -> torch.Tensor:
        """See `__call__`."""
        *earlier, last = self._parts
        layers, hidden_states = list(self._base.layers), self._embed(input_ids, inputs_embeds)
        for part in earlier:
            with part.scope():
                hidden_states, positions = part.receive(hidden_states), part.receive(positions)
                embeddings = self._position_embeddings(part, hidden_states, positions)
                hidden_states = run_layers(
                    layers[part.first : part.end], embeddings, hidden_states, tap=tap, first=part.first
                )
        with last.scope():
            hidden_states, positions = last.receive(hidden_states), last.receive(positions)
            embeddings = self._position_embeddings(last, hidden_states, positions)
            return run_layers(
                layers[last.first :],
                embeddings,
                hidden_states,
                self._base.norm,
                wanted,
                tap=tap,
                first=last.first,
                tokens=self._tokens,
            )

    def _embed(self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Return hidden states [1, num_tokens, hidden_size] before the first layer. A rank's own if divided."""
        with self._parts[0].scope():
            hidden_states: torch.Tensor = (
                self._base.embed_tokens(input_ids.unsqueeze(0))
                if inputs_embeds is None
                else self._tokens.enter(inputs_embeds.unsqueeze(0))
            )
            return hidden_states if self._multiplier is None else hidden_states * self._multiplier

    def _position_embeddings(self, part: Part, hidden_states: torch.Tensor, positions: torch.Tensor) -> list[Any]:
        """Return the (cos, sin) of each of the part's layers, [1, num_tokens, rotary_size] each."""
        position_ids = positions.unsqueeze(-2)  # [1, num_tokens] or [axes, 1, num_tokens]
        rotary = self._base._modules[part.rotary]
        if not self._layer_types:
            return [rotary(hidden_states, position_ids)] * (part.end - part.first)
        types = self._layer_types[part.first : part.end]
        by_type = {name: rotary(hidden_states, position_ids, name) for name in dict.fromkeys(types)}
        return [by_type[name] for name in types]


def tapped(layers: Sequence[torch.nn.Module], tap: Tap | None, of: range | None = None) -> ExitStack:
    """Pass the input of each layer of transformers' own forward to `tap` inside, or of the layers `of` a range."""
    scope = ExitStack()
    for index in () if tap is None else of or range(len(layers)):

        def show(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = index) -> None:
            hidden_states = args[0] if args else kwargs["hidden_states"]
            tap(index, hidden_states[0])  # type: ignore[misc]

        scope.enter_context(layers[index].register_forward_pre_hook(show, with_kwargs=True))
    return scope


def divide_within(layers: Sequence[Any], tokens: TokenDivision) -> list[RemovableHandle]:
    """Let layers have a rank's own tokens in their model's own forward. Return the hooks that do it."""
    if not tokens.divides:
        return []

    def enter(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if tokens.divided:
            return None
        if args:
            return (tokens.enter(args[0]), *args[1:]), options
        return args, options | {"hidden_states": tokens.enter(options["hidden_states"])}

    def leave(_: Any, _given: Any, out: Any) -> Any:
        return (tokens.leave(out[0]), *out[1:]) if isinstance(out, tuple) else tokens.leave(out)

    return [
        layers[0].register_forward_pre_hook(enter, with_kwargs=True),
        layers[-1].register_forward_hook(leave),
    ]


def plain_loop(hf_model: Any, tokens: TokenDivision = WHOLE) -> Loop:
    """Return transformers' own forward of a whole model on one device."""
    whole = Part(hf_model.device, 0, 0)
    return TransformersLoop(hf_model, Crossing(hf_model, (whole,)), tokens)


def choose_loop(
    hf_model: Any,
    holder: AttendHolder,
    head: LogitsHead | NoHead | WholeHead,
    parts: Sequence[Part],
    *,
    lean: bool,
    known: bool = False,
    tokens: TokenDivision = WHOLE,
) -> tuple[Loop, tuple[str, ...]]:
    """Return the fastest loop that gives the model's own logits, and a note on it.

    Args:
        lean: False for transformers' own forward.
        known: True if the lean loop gave the same logits before, on the same weights.
        tokens: division of each step's tokens among ranks.

    Raises:
        ModelError: if even transformers' own layers with our head give other logits, or divided tokens others.
    """
    if lean and known:
        return LeanLoop(hf_model, parts, tokens), ("lean loop over the layers, checked when the weights were saved",)
    crossing = Crossing(hf_model, parts)
    probe = _Probe(hf_model, holder, head, crossing, parts)
    reason = "asked for by lean = false" if not lean else "the decoder is one of ours that is as short"
    if lean and not own_attention.is_bound(hf_model):
        try:
            candidate = LeanLoop(hf_model, parts, tokens)
            difference = probe.difference(candidate)
        except Exception as error:  # an unknown family may fail in any way; the note says how
            reason = f"the lean loop failed: {type(error).__name__}: {error}"
        else:
            if difference <= probe.tolerance:
                crossing.remove()
                return candidate, (f"lean loop over the layers, checked against transformers ({difference:.1e})",)
            reason = f"the lean loop's logits differ by {difference:.1e}"
    generic = TransformersLoop(hf_model, crossing, tokens)
    difference = probe.difference(generic)
    if math.isnan(difference):
        raise _not_finite(hf_model)
    if not difference <= probe.tolerance:
        raise ModelError(
            f"{type(hf_model).__name__} treats its logits in a way this family does not know: they differ by "
            f"{difference:.1e} of the largest, and {reason}",
            fix="set parallel.sequence = false"
            if tokens.divides
            else "use a model family plugin that serves this architecture",
        )
    return generic, (f"transformers' own forward: {reason}",)


def _not_finite(hf_model: Any) -> ModelError:
    """Return the error for a model whose logits are not finite."""
    wrong = [name for name, weight in hf_model.named_parameters() if not bool(weight.isfinite().all())]
    where = f"{type(hf_model).__name__} in {hf_model.config.name_or_path}"
    if wrong:
        return ModelError(f"weights of {where} are not finite: {listed(wrong)}", fix="download the checkpoint again")
    return ModelError(
        f"logits of {where} are not finite in {str(hf_model.dtype).removeprefix('torch.')}",
        fix='set dtype = "float32" or "bfloat16", whose numbers reach further',
    )


class _Probe:
    """A few tokens and what the whole transformers model gives for them, under a plain causal attention."""

    def __init__(
        self,
        hf_model: Any,
        holder: AttendHolder,
        head: LogitsHead | NoHead | WholeHead,
        crossing: Crossing,
        parts: Sequence[Part],
    ) -> None:
        self._holder, self._head, self._crossing, self._last = holder, head, crossing, parts[-1]
        vocab_size = int(hf_model.get_input_embeddings().weight.shape[0])
        self.tolerance = TOLERANCES.get(hf_model.dtype, 5e-2)
        self._positions = torch.arange(PROBE_TOKENS, device=parts[0].device)  # [PROBE_TOKENS]
        self._input_ids = (self._positions * 7 + 1) % vocab_size  # [PROBE_TOKENS]
        # [PROBE_TOKENS, vocab_size], or [PROBE_TOKENS, hidden_size] where there is no head
        self._expected = self._run(lambda: head.of_transformers(self._input_ids, self._positions))

    def difference(self, loop: Loop) -> float:
        """Return the largest difference of a loop's logits, relative to the largest expected one."""
        found = self._run(lambda: self._logits(loop(self._input_ids, self._positions, None, None, None)[0]))
        return float((found - self._expected).abs().max() / self._expected.abs().max().clamp_min(1e-9))

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        with self._last.scope():  # a kernel of ours runs on the current device, wherever its tensors lie
            return self._head(hidden_states)

    def _run(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), self._crossing.scope(), self._holder.serving(plain_attend, plain_advance):
            return compute()


def plain_attend(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    **_: Any,
) -> torch.Tensor:
    """Compute causal attention without window, cap, sinks and index, which is sufficient to compare two loops."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        is_causal=True,
        scale=layer.scale,
        enable_gqa=layer.num_heads != layer.num_kv_heads,
    )  # [1, num_heads, num_tokens, head_size_v]
    return out[0].transpose(0, 1)


def plain_advance(layer: StateLayer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the input of a state layer, without a state. This is sufficient to compare two loops."""
    return inputs[output_like(layer)].clone()
