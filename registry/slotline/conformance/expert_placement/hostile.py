"""L2 of expert placements: loads that are easily done wrong, and ranks that must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from slotline.conformance.expert_placement.placements import copies, sizes
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, Run, check
from slotline.testing.environments.expert_placement import Mixtures
from slotline.testing.subject import Subject

LOADS: Mapping[str, Callable[[int], Any]] = {
    "none": np.zeros,
    "equal": np.ones,
    "one expert": lambda experts: np.eye(experts)[experts // 2] * 1000,
    "the first": lambda experts: np.where(np.arange(experts) < max(experts // 4, 1), 100.0, 0.0),
    "the last": lambda experts: np.where(np.arange(experts) >= experts - 2, 100.0, 1.0),
    "fractions": lambda experts: np.linspace(1e-9, 2e-9, experts),
    "many": lambda experts: np.where(np.arange(experts) % 2, 9e15, 1e14),
}


def loads(subject: Subject) -> list[Case]:
    """Return the sizes with each kind of loads."""
    redundant = subject.capabilities.redundant.refusal(True) is None
    found = [*sizes(subject), *(copies(subject) if redundant else ())]
    return [{**case, "loads": name} for case in found for name in LOADS]


@check(Kind.EXPERT_PLACEMENT, "expert_placement.loads.strange", Level.HOSTILE, cases=loads, cost=0.01)
def loads_strange(run: Run) -> None:
    """No tokens, tokens for one expert alone, and very many of them are placed like others."""
    mixtures = Mixtures(run)
    mixtures.check(np.stack([LOADS[run["loads"]](mixtures.experts)] * 2), run["loads"])


@check(Kind.EXPERT_PLACEMENT, "expert_placement.loads.unchanged", Level.HOSTILE, cases=sizes, cost=0.01)
def loads_unchanged(run: Run) -> None:
    """Loads stay as they are, and can be ones that cannot be written, and lie in memory in another order."""
    mixtures = Mixtures(run)
    given = mixtures.skewed(3)
    other = np.asfortranarray(given)
    kept = given.copy()
    first = mixtures.check(given, "loads")
    mixtures.expect(np.array_equal(given, kept), "the loads were changed")
    other.flags.writeable = False
    mixtures.expect(np.array_equal(mixtures.check(other, "read-only loads"), first), "another order, other slots")


@check(Kind.EXPERT_PLACEMENT, "expert_placement.ranks.agree", Level.HOSTILE, cases=sizes, cost=0.01)
def ranks_agree(run: Run) -> None:
    """The plugins of two ranks give the same answer, whatever each was asked before."""
    mixtures, other = Mixtures(run), Mixtures(run)
    given = mixtures.skewed(3)
    mixtures.check(mixtures.skewed(2), "before")
    mixtures.check(given[::-1].copy(), "before")
    one, two = mixtures.check(given, "one rank"), other.check(given, "another rank")
    mixtures.expect(np.array_equal(one, two), "two ranks place the same loads in different ways")
    mixtures.expect(np.array_equal(mixtures.check(given, "again"), one), "the same loads are placed in another way")
