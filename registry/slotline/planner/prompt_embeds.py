"""Choice of prompts that are embeddings (`prompt_embeds`)."""

from __future__ import annotations

from typing import Any

from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import DrafterCapabilities, ModelFacts, ModelFamilyCapabilities
from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Setting

KEY = "prompt_embeds"


def choose_prompt_embeds(
    loaded: LoadedConfig,
    facts: ModelFacts,
    family: Descriptor[ModelFamilyCapabilities],
    drafter: Descriptor[DrafterCapabilities] | None,
) -> tuple[Setting, ...]:
    """Return the setting that records that prompts may be embeddings. Empty if they may not.

    Raises:
        NegotiationError: with every reason why the model cannot take them.
    """
    if not loaded.config.prompt_embeds:
        return ()
    origin = loaded.origins[KEY].where
    texts = []
    if refusal := family.capabilities.prompt_embeds.refusal(True):
        texts.append(f"model family {family.name!r}: {KEY} {refusal}")
    if facts.parts is not None and not facts.parts.chained:
        texts.append(f"layers of {facts.architecture} read more than the hidden states of the layers before")
    if texts:
        raise NegotiationError(
            f"{KEY} = true ({origin}) cannot hold: {'; '.join(texts)}",
            fix=f"set {KEY} = false, or take another model",
        )
    return (Setting(key=KEY, asked="true", resolved="true", origin=f"{origin}{_note(drafter)}", explicit=True),)


def _note(drafter: Descriptor[Any] | None) -> str:
    """Say what a drafter does for these prompts, if that is nothing."""
    if drafter is None or not drafter.capabilities.needs_computed:
        return ""
    refusal = drafter.capabilities.prompt_embeds.refusal(True)
    return f"; drafter {drafter.name!r} proposes nothing for them: {KEY} {refusal}" if refusal else ""
