"""Descriptor of the structured-output plugin `llguidance`: masks made when they are wanted, hardly any compiling."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from attrs import field, frozen

from slotline.registry.capability import Set
from slotline.registry.contracts.structured_output import CONSTRAINTS, StructuredOutputCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind


def probe(device: DeviceInfo) -> Any:
    """Return the offer, if the package is installed."""
    if find_spec("llguidance") is None:
        return "the package llguidance is not installed; `pip install 'slotline[structured]'` brings it"
    return descriptor.capabilities


@frozen(kw_only=True)
class LLGuidanceOptions:
    """Options of the plugin, in `[structured_output.llguidance]`."""

    threads: int = field(
        default=1,
        metadata={
            "doc": "threads that make the masks of a step; 1 for the one that asks, 0 for one on each core, 4 at most"
        },
    )


descriptor = Descriptor(
    kind=Kind.STRUCTURED_OUTPUT,
    name="llguidance",
    capabilities=StructuredOutputCapabilities(
        constraints=Set(CONSTRAINTS),
        reusable_masks=True,
        priority=20,
        priority_reason="compiling takes milliseconds and a mask microseconds, whatever the vocabulary's size",
    ),
    factory="slotline.plugins.structured_output.llguidance.backend:LLGuidanceBackend",
    options="slotline.plugins.structured_output.llguidance:LLGuidanceOptions",
    probe="slotline.plugins.structured_output.llguidance:probe",
    summary="grammars and masks by llguidance",
)
