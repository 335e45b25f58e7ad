"""Review of a finished plan by plugins: remarks are added to it, and a veto refuses it."""

from __future__ import annotations

from typing import Protocol

from attrs import evolve

from slotline.registry.errors import NegotiationError
from slotline.registry.hooks import PlanNote
from slotline.registry.negotiation.codes import CODES
from slotline.registry.negotiation.failure import Failure
from slotline.registry.negotiation.plan import Plan
from slotline.registry.negotiation.reasons import Note
from slotline.registry.negotiation.request import PlanRequest


class Reviewers(Protocol):
    """Methods of the hook host that are needed here."""

    def review_plan(self, plan: Plan, request: PlanRequest) -> tuple[tuple[str, PlanNote], ...]:
        """Return every reviewer's notes, each with the plugin's label."""


def review(plan: Plan, request: PlanRequest, reviewers: Reviewers) -> Plan:
    """Return the plan with the reviewers' remarks among its warnings. Decisions and digest stay the same.

    Raises:
        NegotiationError: if a reviewer refuses the plan.
    """
    said = reviewers.review_plan(plan, request)
    vetoes = tuple(_note("N511", label, item) for label, item in said if item.veto)
    if vetoes:
        message = f"{', '.join(note.key for note in vetoes)} refused the plan"
        failure = Failure(code="N511", message=message, notes=vetoes)
        raise NegotiationError(f"N511 {message}", fix=CODES["N511"].fix, failure=failure)
    return evolve(plan, warnings=(*plan.warnings, *(_note("N403", label, item) for label, item in said)))


def _note(code: str, label: str, said: PlanNote) -> Note:
    return Note(code=code, key=label, text=said.text)
