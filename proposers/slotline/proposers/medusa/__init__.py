"""Drafter `medusa`: heads that each predict one of the next tokens from the last hidden state alone."""

from __future__ import annotations

from slotline.registry.capability import Max, Set
from slotline.registry.contracts import DrafterCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="medusa",
    summary="heads on the last hidden state, one for each draft token",
    capabilities=DrafterCapabilities(devices=Set(None), max_tokens=Max(), needs_hidden_states=True),
    factory="slotline.proposers.medusa.drafter:MedusaDrafter",
)
