"""L3 of expert placements: loads of any form, one after the other."""

from __future__ import annotations

from slotline.conformance.expert_placement.placements import SIZES
from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, Run, check
from slotline.testing.environments.expert_placement import Mixtures

PLACEMENTS = 60


@check(Kind.EXPERT_PLACEMENT, "expert_placement.fuzz.loads", Level.STATEFUL, explores=True, cost=0.2)
def fuzz_loads(run: Run) -> None:
    """Random loads of random layers are all placed."""
    offer, rng = run.subject.capabilities, run.rng
    ranks = [number for _, number in SIZES if offer.max_ranks.refusal(number) is None] or [1]
    for _ in range(4):
        size, least = rng.choice(ranks), rng.randint(1, 40)
        experts = least + -least % size
        redundant = 0
        if offer.redundant.refusal(True) is None:
            redundant = size * rng.randint(0, min(experts * (size - 1) // size, 4))
        mixtures = Mixtures(run, {"experts": experts, "ranks": size, "redundant": redundant})
        for number in range(PLACEMENTS // 4):
            mixtures.check(mixtures.skewed(rng.randint(1, 3)), f"placement {number} of {mixtures.title}")
