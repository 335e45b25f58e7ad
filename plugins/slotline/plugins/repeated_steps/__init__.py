"""Descriptor of the extension `repeated_steps`: a decode step that repeats the last batch sends only what changed."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="repeated_steps",
    capabilities=ExtensionCapabilities(order=90),
    factory="slotline.plugins.repeated_steps.extension:RepeatedStepsExtension",
    summary="has the device advance the inputs of a decode step that repeats the last batch",
)
