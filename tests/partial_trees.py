"""An attention backend that has masks of trees for layers without windows alone."""

from __future__ import annotations

from attrs import evolve

from slotline.registry.capability import Flag, Limit, Support
from slotline.testing.reference.attention import descriptor as reference

LIMIT = Limit(when="sliding_window", capability="tree_mask", offer=Flag(Support.NOT_IMPLEMENTED))
CAPABILITIES = evolve(reference.capabilities, limits=(*reference.capabilities.limits, LIMIT))
descriptor = evolve(reference, name="partial_trees", capabilities=CAPABILITIES)
