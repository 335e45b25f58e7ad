"""Steps of layers that read an encoder's keys."""

from __future__ import annotations

from slotline.testing.check import Run
from slotline.testing.environments.attention_case import Case
from slotline.testing.environments.attention_choice import examine, world

CROSS = (
    (((1, 37), (1, 5)), ()),
    (((3, 37), (1, 5), (2, 9), (0, 4)), (0, 2)),
    (((1, 40), (1, 3)), (0, 1)),
)
"""Query tokens and encoder's keys of each request, and the requests whose keys the step stores."""


def cross_step(run: Run, case: Case) -> None:
    """Run a step of a case with an encoder's keys. Keys of requests that began earlier are already in the cache."""
    made = world(run, case)
    for request, (_, length) in enumerate(case.requests):
        if request not in case.beginning:
            made.store(request, range(length))
    examine(run, made)
