"""Drafter `grammar`: no guesses of its own, so that what is verified is what grammars of structured output force."""

from __future__ import annotations

from slotline.registry.capability import Max, Set
from slotline.registry.contracts import DrafterCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="grammar",
    summary="nothing but what the grammars of structured output force",
    capabilities=DrafterCapabilities(devices=Set(None), max_tokens=Max()),
    factory="slotline.proposers.grammar.drafter:GrammarDrafter",
)
