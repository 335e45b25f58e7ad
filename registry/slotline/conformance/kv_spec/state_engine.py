"""L5 of specs of states: text from checkpoints, in a whole engine on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterable

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.state_engine import MODELS, UNIT, models_of, texts
from slotline.testing.environments.state_spec import context_of, declared_kinds, refuse_blocks
from slotline.testing.subject import Subject

LONGEST_INTERVAL = 512


def models(subject: Subject) -> Iterable[Case]:
    """Return the first tiny model with a kind that the spec declares, all of them if exhaustive.

    Raises:
        NotApplicable: if the plugin holds blocks.
    """
    refuse_blocks(subject)
    found = [{"model": model.architecture} for model in models_of(subject)]
    return found if subject.exhaustive else found[:1]


@check(
    Kind.KV_SPEC,
    "kv_spec.state.engine.text",
    Level.ENGINE,
    needs={"state": True, "prefix_caching": True},
    cases=models,
    cost=2.0,
)
def text(run: Run) -> None:
    """Equal prompts go on from a checkpoint, and the text is that of an engine without prefix caching."""
    spec = run.subject.build(context_of(declared_kinds(run.subject)[0], unit=UNIT))
    if spec.interval > LONGEST_INTERVAL:
        raise NotApplicable(f"an interval of {spec.interval} tokens is too long for the suite")
    model = next(model for model in MODELS if model.architecture == run["model"])
    (wanted, none), (found, cached) = texts(run.subject, model, spec.interval + 20)
    run.measured["cached_tokens"] = cached
    if any(none) or not all(cached[2:]):
        raise Failed(f"of four prompts, the last two of which came before, {cached} tokens were cached")
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        if one != other:
            place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            raise Failed(
                f"prompt {number}, of which {cached[number]} tokens were cached: output token {place} is "
                f"{other[place]}, and {one[place]} without prefix caching"
            )
