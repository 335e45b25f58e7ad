"""Attention backends that have masks of trees, or plans for every replay, for layers without windows alone.

All requests have the same tree.
"""

from __future__ import annotations

from attrs import evolve

from slotline.registry.capability import Flag, Limit, Support
from slotline.testing.reference.attention import descriptor as reference

LIMITS = tuple(
    Limit(when="sliding_window", capability=capability, offer=Flag(Support.NOT_IMPLEMENTED))
    for capability in ("tree_mask", "plan_once")
)
CAPABILITIES = evolve(
    reference.capabilities,
    plan_once=Flag(True),
    request_trees=Flag(Support.NOT_IMPLEMENTED),
    limits=(*reference.capabilities.limits, *LIMITS),
)
descriptor = evolve(reference, name="partial_trees", capabilities=CAPABILITIES)
