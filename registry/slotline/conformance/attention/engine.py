"""L5: the backend in a whole engine, on the small model that ships."""

from __future__ import annotations

from collections.abc import Iterable

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, NotApplicable, Run, check
from slotline.testing.environments import engine
from slotline.testing.subject import Subject


def schedules(_subject: Subject) -> Iterable[Case]:
    """Return schedules with prompts in one piece, and with pieces computed along with decoding requests."""
    return ({"steps": "whole"}, {"steps": "chunked"})


@check(Kind.ATTENTION, "attention.engine.text", Level.ENGINE, cases=schedules, cost=5.0, profile="engine")
def text(run: Run) -> None:
    """Greedy text in float32 equals the reference backend's, token for token, over cached prefixes too."""
    if run.subject.capabilities.dtypes.refusal(("float32", "float32")):
        raise NotApplicable("in other dtypes than float32 right backends may give different tokens")
    settings = engine.CHUNKED if run["steps"] == "chunked" else engine.WHOLE
    engine.compare(run.subject, "attention.backend", run.subject.name, settings)
