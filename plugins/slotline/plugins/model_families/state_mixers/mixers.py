"""Finds the mixers of a transformers model that keep a state, and replaces their forward.

transformers has no interface for these as it has for attention. Classes that the tests compare are listed by name. A
module of another class is known by its parts, and the self-check at load shows whether that was right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve

from slotline.plugins.model_families.binding import AttendHolder
from slotline.plugins.model_families.state_mixers.kinds import (
    ApartDeltaMixer,
    DividedDeltaMixer,
    FalconH1Mixer,
    GatedDeltaMixer,
    HeadedMamba1Mixer,
    KimiDeltaMixer,
    LightningMixer,
    Mamba1Mixer,
    Mamba2Mixer,
    Mixer,
    RgLruMixer,
    ShortConvMixer,
)
from slotline.plugins.model_families.state_mixers.slot import StateSlot
from slotline.registry.contracts.state import StateLayer
from slotline.registry.errors import ModelError

MIXERS: Mapping[str, Mixer] = MappingProxyType(
    {
        "BambaMixer": Mamba2Mixer(),
        "FalconH1Mixer": FalconH1Mixer(),
        "FalconMambaMixer": Mamba1Mixer(),
        "GraniteMoeHybridMambaLayer": Mamba2Mixer(),
        "JambaMambaMixer": Mamba1Mixer(),
        "Lfm2ShortConv": ShortConvMixer(),
        "Mamba2Mixer": Mamba2Mixer(),
        "MambaMixer": Mamba1Mixer(),
        "NemotronHMamba2Mixer": Mamba2Mixer(),
        "Qwen3NextGatedDeltaNet": GatedDeltaMixer(),
        "RecurrentGemmaRecurrentBlock": RgLruMixer(),
        "Zamba2MambaMixer": Mamba2Mixer(),
    }
)
"""Class name in transformers -> adapter."""

KINDS: tuple[Mixer, ...] = (
    GatedDeltaMixer(),
    DividedDeltaMixer(),
    ApartDeltaMixer(),
    KimiDeltaMixer(),
    LightningMixer(),
    HeadedMamba1Mixer(),
    ShortConvMixer(),
)
"""Adapters of modules that are known by their parts."""


def find(hf_model: torch.nn.Module) -> tuple[StateLayer, ...]:
    """Return the state layers of a model, in the order of its modules."""
    found = [layer for name, module, mixer in _mixers(hf_model) for layer in mixer.layers(name, module)]
    return tuple(evolve(layer, index=index) for index, layer in enumerate(found))


def bind(hf_model: torch.nn.Module, layers: Iterable[StateLayer], holder: AttendHolder) -> None:
    """Have every mixer that keeps a state call the holder's `advance`.

    Args:
        hf_model: changed in place.
        layers: what `find` found in this model, or in another one of the same configuration.

    Raises:
        ModelError: if the model's mixers are others.
    """
    known = {layer.name: layer for layer in layers}
    for name, module, mixer in _mixers(hf_model):
        try:
            own = tuple(known[layer.name] for layer in mixer.layers(name, module))
        except KeyError as error:
            raise ModelError(
                f"the loaded model has a state layer {error.args[0]!r} that inspection has not found",
                fix="inspect the checkpoint again: the facts belong to another model",
            ) from error
        module.forward = _forward(mixer, module, StateSlot(own, holder))


def _forward(mixer: Mixer, module: Any, slot: StateSlot) -> Callable[..., Any]:
    def forward(hidden_states: torch.Tensor, **given: Any) -> Any:
        """Map [1, num_tokens, hidden_size] to the same shape. Caches and masks of transformers are not used."""
        out = mixer.forward(module, slot, hidden_states[0], given)[None]
        return (out, None) if mixer.in_pair else out

    return forward


def _mixers(hf_model: torch.nn.Module) -> list[tuple[str, Any, Mixer]]:
    found = ((name, module, mixer_of(module)) for name, module in hf_model.named_modules())
    return [(name, module, mixer) for name, module, mixer in found if mixer is not None]


def mixer_of(module: torch.nn.Module) -> Mixer | None:
    """Return the adapter of a module that keeps a state, None for another module."""
    listed = MIXERS.get(type(module).__name__)
    if listed is not None:
        return listed
    return next((mixer for mixer in KINDS if all(hasattr(module, part) for part in mixer.parts)), None)
