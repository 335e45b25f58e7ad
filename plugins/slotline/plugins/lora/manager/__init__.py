"""Descriptor of the extension `adapters`: the LoRA adapters of requests, served by the plugin of the slot `lora`."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="adapters",
    capabilities=ExtensionCapabilities(order=20, inputs=("lora_request",)),
    factory="slotline.plugins.lora.manager.build:build_adapters",
    summary="keeps the LoRA adapters of requests in slots beside the weights, or one merged into them",
)
