"""L1 of expert placements: every expert has a slot, and no rank gets more than without a plugin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, Run, check
from slotline.testing.environments.expert_placement import Mixtures
from slotline.testing.subject import Subject

SIZES = ((8, 2), (8, 4), (12, 3), (64, 8), (5, 5))
"""Experts and ranks."""
COPIES = ((8, 2, 2), (8, 4, 4), (7, 3, 2), (64, 8, 16))
"""Experts, ranks and redundant slots."""


def sizes(subject: Subject) -> Iterator[Case]:
    """Yield numbers of experts and ranks that the plugin takes."""
    for experts, ranks in SIZES:
        if subject.capabilities.max_ranks.refusal(ranks) is None:
            yield {"experts": experts, "ranks": ranks, "redundant": 0}


def copies(subject: Subject) -> Iterable[Case]:
    """Yield numbers of experts, ranks and redundant slots that the plugin takes."""
    for experts, ranks, redundant in COPIES:
        if subject.capabilities.max_ranks.refusal(ranks) is None:
            yield {"experts": experts, "ranks": ranks, "redundant": redundant}


@check(Kind.EXPERT_PLACEMENT, "expert_placement.slots.all", Level.NUMERICS, cases=sizes, cost=0.01)
def slots_all(run: Run) -> None:
    """Each expert has one slot, each rank as many slots as another, and no rank more tokens than without a plugin."""
    mixtures = Mixtures(run)
    mixtures.check(mixtures.skewed(3), "three layers")


@check(
    Kind.EXPERT_PLACEMENT,
    "expert_placement.slots.copies",
    Level.NUMERICS,
    needs={"redundant": True},
    cases=copies,
    cost=0.01,
)
def slots_copies(run: Run) -> None:
    """Redundant slots hold copies of experts, and no rank has more tokens than without a plugin."""
    mixtures = Mixtures(run)
    mixtures.check(mixtures.skewed(3), "three layers")


@check(Kind.EXPERT_PLACEMENT, "expert_placement.layers.own", Level.NUMERICS, cases=sizes, cost=0.01)
def layers_own(run: Run) -> None:
    """Each layer is placed by its own tokens: as it is placed alone."""
    mixtures = Mixtures(run)
    loads = mixtures.skewed(4)
    loads[1] = loads[0][::-1]
    together = mixtures.check(loads.copy(), "four layers")
    for number, layer in enumerate(loads):
        alone = mixtures.check(layer[None], f"layer {number} alone")
        mixtures.expect(np.array_equal(alone[0], together[number]), f"layer {number} is placed in another way alone")
