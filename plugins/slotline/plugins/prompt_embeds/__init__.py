"""Descriptor of the extension `prompt_embeds`: prompts that are embeddings instead of tokens."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="prompt_embeds",
    capabilities=ExtensionCapabilities(inputs=("prompt_embeds",), order=11),
    factory="slotline.plugins.prompt_embeds.extension:PromptEmbedsExtension",
    summary="puts the embeddings of prompts into the steps that compute them",
)
