"""Form of processed logits, and properties of each row by itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Family, Level, Run, check
from slotline.testing.environments.logits_processor import (
    Entry,
    World,
    random_logits,
    some_requests,
    world_of,
)
from slotline.testing.oracles.logits_processor import difference, greedy_change, lifted_ban

FORMS = ("plain", "ties", "bans", "large")


def by_form(_subject: object) -> list[Case]:
    """Return a case for each kind of random logits."""
    return [{"logits": form} for form in FORMS]


def processed(run: Run, form: str, steps: int = 6) -> Iterator[tuple[World, torch.Tensor, torch.Tensor]]:
    """Yield a few steps of six requests: the world, the logits, and the processed logits."""
    rng = run.rng
    for _ in range(steps):
        world = world_of(run.subject, some_requests(run.subject, rng))
        logits = random_logits(rng, len(world.requests), run.subject.device.type, form)
        yield world, logits, world.apply([Entry(row) for row in world.requests], logits)


@check(Kind.LOGITS_PROCESSOR, "logits_processor.logits.form", Level.NUMERICS, cases=by_form, cost=0.01)
def logits_form(run: Run) -> None:
    """Processed logits have the shape, the dtype and the device of the given ones, and no number becomes NaN."""
    for _ in processed(run, run["logits"]):
        pass  # the world looks at the form of each answer


@check(Kind.LOGITS_PROCESSOR, "logits_processor.logits.deterministic", Level.NUMERICS)
def logits_deterministic(run: Run) -> None:
    """The same logits of the same requests give the same result, from a used processor and from a new one."""
    for world, logits, after in processed(run, "plain"):
        entries = [Entry(row) for row in world.requests]
        fresh = world_of(run.subject, world.requests)
        for what, again in (("again", world.apply(entries, logits)), ("from a new one", fresh.apply(entries, logits))):
            for index, entry in enumerate(entries):
                text = difference(after[index], again[index])
                if text is not None:
                    raise Failed(f"row {entry.row}, the same logits {what}: {text}; {world.requests[entry.row]}")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.logits.bans", Level.NUMERICS, cost=0.02)
def logits_bans(run: Run) -> None:
    """A token that another processor or a grammar has banned, at minus infinity, stays banned."""
    for world, logits, after in processed(run, "bans"):
        lifted = lifted_ban(logits, after)
        if lifted is not None:
            entry, token = lifted
            raise Failed(
                f"row {entry}: the logit of token {token} was -inf and is {float(after[entry, token]):.6g}: what was "
                f"banned before may be sampled; {world.requests[entry]}"
            )


@check(
    Kind.LOGITS_PROCESSOR,
    "logits_processor.finite.kept",
    Level.NUMERICS,
    needs={"keeps_finite": True},
    cases=by_form,
)
def finite_kept(run: Run) -> None:
    """Finite logits stay finite and the others what they are: nobody looks for spoiled rows behind the processor."""
    for world, logits, after in processed(run, run["logits"]):
        for row, token in (logits.isfinite() != after.isfinite()).nonzero().tolist():
            raise Failed(
                f"row {row}: the logit of token {token} was {float(logits[row, token]):.6g} and is "
                f"{float(after[row, token]):.6g}, though keeps_finite is declared; {world.requests[row]}"
            )


@check(
    Kind.LOGITS_PROCESSOR,
    "logits_processor.argmax.invariant",
    Level.NUMERICS,
    needs={"argmax_invariant": True},
    cases=by_form,
)
def argmax_invariant(run: Run) -> None:
    """The greedy token stays the greedy one, ties included: batches of greedy requests skip the processor."""
    _same_greedy(run, run["logits"])


@check(
    Kind.LOGITS_PROCESSOR,
    "logits_processor.underdeclared.argmax_invariant",
    Level.NUMERICS,
    needs={"argmax_invariant": True},
    family=Family.UNDERDECLARED,
)
def argmax_underdeclared(run: Run) -> None:
    """The greedy token never changed, though argmax_invariant is not declared: greedy batches could skip it."""
    for form in FORMS:
        _same_greedy(run, form)


def _same_greedy(run: Run, form: str) -> None:
    for world, logits, after in processed(run, form, steps=12):
        for row, request in world.requests.items():
            text = greedy_change(logits[row], after[row])
            if text is not None:
                raise Failed(f"row {row}: {text}; {request}")
