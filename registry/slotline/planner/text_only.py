"""Choice of the text part of a model that takes more than text (`multimodal.text_only`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slotline.planner.model_family import family_for
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import ModelFacts, ModelFamilyCapabilities
from slotline.registry.descriptor import Descriptor
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Setting

KEY = "multimodal.text_only"


def choose_text_only(
    loaded: LoadedConfig, facts: ModelFacts, family: Descriptor[ModelFamilyCapabilities]
) -> tuple[Setting, ...]:
    """Return the setting that records that a model's encoders are left out. Empty if that was not asked for.

    Args:
        facts: what the family that was chosen for text alone says of the model.

    Raises:
        NegotiationError: if the family serves the model with its encoders only.
    """
    if not loaded.config.multimodal.text_only:
        return ()
    origin = loaded.origins[KEY].where
    if facts.modalities or facts.max_encoder_len:
        taken = ", ".join(modality.name for modality in facts.modalities) or "an encoder's output"
        raise NegotiationError(
            f"{KEY} = true ({origin}) cannot hold: no model family serves the text part of {facts.architecture} alone, "
            f"and {family.name!r} serves it with {taken}",
            fix=f"set {KEY} = false, or take a model family plugin that serves its text part",
        )
    said = f"{origin}; model family {family.name!r}"
    return (Setting(key=KEY, asked="true", resolved="true", origin=said, explicit=True),)


def text_only_hint(registry: PluginRegistry, path: Path, family: Descriptor[Any]) -> str:
    """Return what to add to a fix for a setting that `family` refuses, "" if text alone would not help."""
    if family_for(registry, path, text_only=True)[0] is family:
        return ""
    return f", or set {KEY} = true to serve its text part alone"
