"""Descriptor of the extension `guidance`: second prompts, computed together with those of requests."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="guidance",
    capabilities=ExtensionCapabilities(order=50),
    factory="slotline.plugins.guidance.extension:GuidanceExtension",
    summary="computes the companions that logits processors ask for, in the same steps as their requests",
)
