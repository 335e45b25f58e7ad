"""One stage of a model whose other stages are with other ranks: its modules alone, and stand-ins for the rest.

transformers' own forward still runs over all layers. A stand-in returns the hidden states that it is given, so they
reach the stage's first layer, before which what the stage before sent takes their place.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from torch import nn

from slotline.plugins.model_families import own_attention, stages, structure
from slotline.plugins.model_families.binding import AttendHolder
from slotline.plugins.model_families.chain import run_layers
from slotline.plugins.model_families.loops import (
    PROBE_TOKENS,
    TOLERANCES,
    LeanLoop,
    Loop,
    divide_within,
    plain_advance,
    plain_attend,
    tapped,
)
from slotline.plugins.model_families.stages import ROTARY, Part
from slotline.plugins.model_families.tensor_parallel.collectives import Joined
from slotline.plugins.model_families.tensor_parallel.token_division import WHOLE, TokenDivision
from slotline.registry.errors import ModelError

if TYPE_CHECKING:
    from slotline.registry.contracts.model_family import ModelContext, Stage, Tap
    from slotline.registry.contracts.weights import ModelWeights


@frozen
class OwnStage:
    """Layers `first` .. `end` - 1 of `total`."""

    first: int
    end: int
    total: int

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the last norm and the output projection."""
        return self.end == self.total


def own_stage(hf_model: Any, stage: Stage | None) -> OwnStage | None:
    """Return the stage to keep of a model, None for a whole one."""
    return None if stage is None else OwnStage(stage.first_layer, stage.end_layer, len(hf_model.base_model.layers))


def parts_of(hf_model: Any, context: ModelContext) -> tuple[Part, ...]:
    """Return the parts of a model, of a stage alone the one that is there."""
    stage = context.own_stage
    if stage is None:
        return stages.parts_of(hf_model, context.device, context.stages)
    return (Part(torch.device(context.device), stage.first_layer, stage.end_layer),)


def gives_logits(hf_model: Any, stage: Stage | None) -> bool:
    """Return True if a model has the last layer."""
    return stage is None or stage.end_layer == len(hf_model.base_model.layers)


def leave_out(hf_model: Any, stage: OwnStage | None, *, with_embedding: bool = False) -> Callable[[], None]:
    """Take the modules of other stages out of a model, which frees their weights.

    Args:
        with_embedding: keep the embedding, whichever stage it is in.

    Returns:
        A function that puts stand-ins into their places, to call after the passes, which know real modules alone.
    """
    if stage is None:
        return lambda: None
    absent: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    kept = hf_model.get_input_embeddings() if with_embedding else None
    for holder, names in _others(hf_model, stage):
        order = dict(holder._modules)
        for name in (name for name in names if kept is None or holder.get_submodule(name) is not kept):
            order[name] = _stand_in(holder.get_submodule(name))
            del holder._modules[name]
        absent.append((holder, order))
    _free(hf_model)

    def complete() -> None:
        for holder, order in absent:
            there = dict(holder._modules)
            holder._modules.clear()
            holder._modules.update({name: there.pop(name, module) for name, module in order.items()} | there)

    return complete


def own_weights(hf_model: Any, weights: ModelWeights, stage: Stage | None) -> ModelWeights:
    """Return those of the quantized weights whose modules a stage has."""
    own = own_stage(hf_model, stage)
    if own is None:
        return weights
    absent = {
        id(module)
        for holder, names in _others(hf_model, own)
        for name in names
        for module in holder.get_submodule(name).modules()
    }
    there = {name: one for name, one in weights.modules.items() if id(hf_model.get_submodule(name)) not in absent}
    return evolve(weights, modules=there)


def own_joined(hf_model: nn.Module, joined: Joined) -> Joined:
    """Return those of the modules whose outputs ranks join that a model has."""

    def there(names: Iterable[str]) -> list[str]:
        found = []
        for name in names:
            with suppress(AttributeError):
                hf_model.get_submodule(name)
                found.append(name)
        return found

    return evolve(
        joined,
        summed=there(joined.summed),
        within=there(joined.within),
        embeddings={name: joined.embeddings[name] for name in there(joined.embeddings)},
        gathered={name: joined.gathered[name] for name in there(joined.gathered)},
        joining=there(joined.joining),
        mixtures=there(joined.mixtures),
    )


def _others(hf_model: Any, stage: OwnStage) -> list[tuple[nn.Module, list[str]]]:
    """Return the children that other stages have, by the modules that hold them."""
    base, part = hf_model.base_model, Part(torch.device("cpu"), stage.first, stage.end)
    found = stages.own_modules(hf_model, part, is_first=stage.is_first, is_last=stage.is_last)
    kept = {base, base.layers, *(module for _, _, module in found)}
    holders = dict.fromkeys((hf_model, base, base.layers))  # a model without a head is its own base
    return [
        (holder, [name for name, child in holder.named_children() if child not in kept and not name.startswith(ROTARY)])
        for holder in holders
    ]


def _stand_in(module: nn.Module) -> nn.Module:
    """Return a module of the same class and attributes, without weights, that returns what it is given."""
    found = copy.copy(module)
    found._modules, found._parameters, found._buffers = {}, {}, {}
    found.forward = _Passing()
    return found


class _Passing:
    """Forward of a stand-in. `pairs` says that layers of its model return a pair."""

    pairs = False

    def __call__(self, hidden_states: Any = None, *_: Any, **given: Any) -> Any:
        hidden_states = given.get("hidden_states", hidden_states)
        return (hidden_states, None) if self.pairs else hidden_states


def _free(hf_model: nn.Module) -> None:
    """Give the memory of weights back that lay on a device."""
    device = next(hf_model.parameters()).device
    if device.type == "cuda":
        torch.cuda.empty_cache()


class LeanStage(LeanLoop):
    """Loop over the layers of one stage. See `LeanLoop`."""

    def __init__(self, hf_model: Any, stage: OwnStage, part: Part, tokens: TokenDivision = WHOLE) -> None:
        super().__init__(hf_model, (part,), tokens)
        self._stage = stage

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        tap: Tap | None,
    ) -> torch.Tensor:
        """Return hidden states [1, n, hidden_size]. `inputs_embeds` are what the stage before sent, or a prompt's."""
        stage = self._stage
        if stage.is_first or inputs_embeds is None:
            states = self._embed(input_ids, inputs_embeds)
        else:
            states = self._tokens.enter(inputs_embeds.unsqueeze(0))
        embeddings = self._position_embeddings(self._parts[0], states, positions)
        layers = list(self._base.layers)[stage.first : stage.end]
        norm = self._base.norm if stage.is_last else None
        return run_layers(layers, embeddings, states, norm, wanted, tap=tap, first=stage.first, tokens=self._tokens)


class TransformersStage:
    """Base model's own forward, of which only one stage's layers do anything."""

    def __init__(self, hf_model: Any, stage: OwnStage, holder: AttendHolder, tokens: TokenDivision = WHOLE) -> None:
        self._base, self._stage, self._tokens = hf_model.base_model, stage, tokens
        self._dtype = hf_model.dtype
        self._options = structure.taking(self._base.forward, {"use_cache": False, "return_dict": True})
        self._received: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._pairs = False
        layers = list(self._base.layers)
        self._hooks = [
            layers[stage.first].register_forward_pre_hook(self._before, with_kwargs=True),
            *divide_within(layers[stage.first : stage.end], tokens),
            layers[stage.end - 1].register_forward_hook(self._after),
        ]
        self._settle(layers, holder, probe_of(hf_model, stage))

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        tap: Tap | None = None,
    ) -> torch.Tensor:
        """Return hidden states [1, n, hidden_size]. `inputs_embeds` are what the stage before sent, or a prompt's."""
        given = {"position_ids": positions.unsqueeze(-2)} | self._options
        if inputs_embeds is None:
            given["input_ids"] = input_ids.unsqueeze(0)
        else:
            given["inputs_embeds"] = inputs_embeds.unsqueeze(0)
            self._received = None if self._stage.is_first else given["inputs_embeds"]
        shown = tapped(self._base.layers, self._tokens.tapping(tap), range(self._stage.first, self._stage.end))
        with self._tokens.step(positions.shape[-1], divided=False), shown:
            outputs = self._base(**given)
        states, self._received, self._sent = self._sent, None, None
        if not self._stage.is_last:
            assert states is not None
            return states
        found: torch.Tensor = outputs.last_hidden_state.to(self._dtype)
        return found if wanted is None else found[:, wanted]

    def _settle(
        self,
        layers: list[nn.Module],
        holder: AttendHolder,
        probe: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Find out whether the layers return pairs, by a run of a few tokens."""
        passing = [layer.forward for layer in layers if isinstance(layer.forward, _Passing)]
        error: Exception | None = None
        for pairs in (False, True):
            for one in passing:
                one.pairs = pairs
            try:
                with torch.no_grad(), holder.serving(plain_attend, plain_advance):
                    self(*probe[:2], None, probe[2])
            except Exception as failed:  # an unknown family may fail in any way
                error, self._received, self._sent = failed, None, None
                continue
            if self._pairs == pairs:
                return
        raise ModelError(
            f"{type(self._base).__name__} does not run with a part of its layers: {error}",
            fix="set parallel.pipeline = 1, or use another model family plugin",
        ) from error

    def _before(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._received is None:
            return None
        if args:
            return (self._received, *args[1:]), options
        return args, options | {"hidden_states": self._received}

    def _after(self, _: nn.Module, _given: Any, out: Any) -> None:
        self._pairs = isinstance(out, tuple)
        self._sent = out[0] if isinstance(out, tuple) else out


def probe_of(hf_model: Any, stage: OwnStage) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return a few tokens as a stage's loop takes them: ids, positions, and what the stage before would send."""
    base = hf_model.base_model
    weight = next(one for one in base.parameters() if one.is_floating_point())
    positions = torch.arange(PROBE_TOKENS, device=weight.device)  # [PROBE_TOKENS]
    if stage.is_first:
        return positions * 7 + 1, positions, None
    size = int(base.config.hidden_size)
    drawn = torch.randn(PROBE_TOKENS, size, generator=torch.Generator().manual_seed(0))
    return positions, positions, drawn.to(weight.device, hf_model.dtype)


def choose_stage_loop(
    hf_model: Any,
    holder: AttendHolder,
    stage: OwnStage,
    part: Part,
    *,
    lean: bool,
    tokens: TokenDivision = WHOLE,
) -> tuple[Loop, tuple[str, ...]]:
    """Return the fastest loop that gives the numbers of transformers' own layers, and a note on it.

    Args:
        lean: False for transformers' own forward.
    """
    generic = TransformersStage(hf_model, stage, holder, tokens)
    _compare(hf_model, generic, holder, stage, tokens)
    where = f"layers {stage.first} to {stage.end - 1} of {stage.total}"
    if not lean or own_attention.is_bound(hf_model):
        reason = "the decoder is one of ours that is as short" if lean else "asked for by lean = false"
        return generic, (f"transformers' own forward over {where}: {reason}",)

    probe = probe_of(hf_model, stage)

    def run(loop: Loop) -> torch.Tensor:
        with torch.no_grad(), holder.serving(plain_attend, plain_advance):
            return loop(*probe[:2], None, probe[2], None).float()

    try:
        candidate, expected = LeanStage(hf_model, stage, part, tokens), run(generic)
        difference = _difference(run(candidate), expected)
    except Exception as error:  # an unknown family may fail in any way; the note says how
        return generic, (f"transformers' own forward over {where}: {type(error).__name__}: {error}",)
    if math.isnan(difference) or difference > TOLERANCES.get(hf_model.dtype, 5e-2):
        return generic, (f"transformers' own forward over {where}: the lean loop differs by {difference:.1e}",)
    generic.remove()
    return candidate, (f"lean loop over {where}, checked against transformers ({difference:.1e})",)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number that is expected."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9))


def _compare(hf_model: Any, loop: Loop, holder: AttendHolder, stage: OwnStage, tokens: TokenDivision) -> None:
    """Compare a stage whose ranks divide the tokens of a few with one whose ranks have all of them.

    Raises:
        ModelError: if they give other numbers.
    """
    if not tokens.divides:
        return
    probe = probe_of(hf_model, stage)
    with torch.no_grad(), holder.serving(plain_attend, plain_advance):
        found = loop(*probe[:2], None, probe[2], None).float()
    with torch.no_grad(), holder.serving(plain_attend, plain_advance), tokens.left_whole():
        expected = loop(*probe[:2], None, probe[2], None).float()
    if not _difference(found, expected) <= TOLERANCES.get(hf_model.dtype, 5e-2):
        raise ModelError(
            f"parallel.sequence = true: {type(hf_model).__name__} gives other numbers with divided tokens",
            fix="set parallel.sequence = false",
        )
