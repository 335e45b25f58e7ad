"""Features that work although they are not declared."""

from __future__ import annotations

from slotline.conformance.state.problems import by_kind, hostile, most_tokens
from slotline.conformance.state.rollback import DRAFTS
from slotline.registry.descriptor import Kind
from slotline.testing.check import Family, Level, NotApplicable, Run, check


@check(
    Kind.STATE,
    "state.underdeclared.rollback",
    Level.HOSTILE,
    cases=by_kind,
    needs={"rollback": True},
    family=Family.UNDERDECLARED,
)
def rollback(run: Run) -> None:
    """Goes back to an accepted position, though rollback is not declared."""
    if most_tokens(run.subject) < 1 + DRAFTS:
        raise NotApplicable(f"takes fewer than {1 + DRAFTS} new tokens of a request in a batch")
    session = hostile(run, max_draft_tokens=DRAFTS)
    request = session.request(2)
    session.feed([(request, 3)])
    session.step([(request, 1 + DRAFTS)])
    session.commit({request.slot: 2})


@check(
    Kind.STATE,
    "state.underdeclared.checkpoints",
    Level.HOSTILE,
    cases=by_kind,
    needs={"checkpoints": True},
    family=Family.UNDERDECLARED,
)
def checkpoints(run: Run) -> None:
    """Copies a slot, though checkpoints are not declared."""
    session = hostile(run)
    request = session.request(1)
    session.feed([(request, 5)])
    copied = session.copy(request, 4, "copy in slot 4")
    session.step([(copied, 1), (request, 1)])
