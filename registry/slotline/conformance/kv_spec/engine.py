"""L5: the cache spec in a whole engine, on the small model that ships."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, Run, check
from slotline.testing.environments import engine
from slotline.testing.environments.state_spec import refuse_states
from slotline.testing.subject import Subject


def schedules(subject: Subject) -> tuple[Case, ...]:
    """Return the cases: prompts in one piece, and cut into pieces next to decoding requests."""
    refuse_states(subject)
    return ({"steps": "whole"}, {"steps": "chunked"})


@check(Kind.KV_SPEC, "kv_spec.engine.text", Level.ENGINE, needs={"kv_kinds": "full"}, cases=schedules, cost=5.0)
def text(run: Run) -> None:
    """Greedy text in float32 with this cache equals that with the built-in one, token for token."""
    settings = engine.CHUNKED if run["steps"] == "chunked" else engine.WHOLE
    engine.compare(run.subject, "cache.kv_spec.full", run.subject.name, settings)
