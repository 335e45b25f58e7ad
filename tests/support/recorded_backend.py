"""Descriptor of the reference attention for recorded graphs."""

from __future__ import annotations

from attrs import evolve

from slotline.registry.capability import GraphSupport, Level
from slotline.testing.reference.attention import descriptor as reference

descriptor = evolve(
    reference,
    name="recorded_attention",
    capabilities=evolve(reference.capabilities, graphs=Level(GraphSupport.ALWAYS), bounded_lengths=False),
    factory="recorded_attention:RecordedAttention",
)
