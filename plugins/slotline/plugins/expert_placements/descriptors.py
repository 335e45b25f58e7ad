"""Descriptors of our expert placements."""

from __future__ import annotations

from slotline.registry.capability import Flag
from slotline.registry.contracts.expert_placement import ExpertPlacementCapabilities
from slotline.registry.descriptor import Descriptor, Kind

greedy: Descriptor[ExpertPlacementCapabilities] = Descriptor(
    kind=Kind.EXPERT_PLACEMENT,
    name="greedy",
    capabilities=ExpertPlacementCapabilities(redundant=Flag(True)),
    factory="slotline.plugins.expert_placements.greedy:Greedy",
    summary="copies the experts with most tokens, and gives the largest first to the rank with least",
)
