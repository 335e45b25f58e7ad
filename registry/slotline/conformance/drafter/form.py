"""Form of a proposal in benign surroundings: shape, vocabulary, end, and parts."""

from __future__ import annotations

from collections.abc import Iterable

from slotline.conformance.drafter.comparing import same_drafts
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.drafter import World, draft_lengths, random_request, tree_forms, world_of
from slotline.testing.oracles.drafter import Fault
from slotline.testing.subject import Subject


def by_length(subject: Subject) -> Iterable[Case]:
    """Return a case for each number of draft tokens, or for a few of them."""
    lengths = draft_lengths(subject)
    return [{"num_tokens": n} for n in lengths if subject.exhaustive or n in (1, 2, 4, lengths[-1])]


def _faults(run: Run) -> list[Fault]:
    """Return the faults in the form over a few steps of a few requests."""
    world = World(run.subject, num_tokens=run.case.get("num_tokens", 0), form=run.case.get("form", ""))
    rng, found = run.rng, []
    for _ in range(6):
        rows = rng.sample(range(world.max_requests), rng.randint(1, world.max_requests))
        for row in rows:
            world.admit(row, random_request(rng))
        found += world.draft(rows)[1]
        for row in rows:
            world.release(row)
    return found


def _none_of(run: Run, *rules: str) -> None:
    faults = [fault for fault in _faults(run) if fault.rule in rules]
    if faults:
        raise Failed(faults[0].text)


@check(Kind.DRAFTER, "drafter.draft.shape", Level.NUMERICS, cases=by_length)
def draft_shape(run: Run) -> None:
    """token_ids are int64, one row for each request, and no longer than what was negotiated."""
    _none_of(run, "shape")


@check(Kind.DRAFTER, "drafter.draft.vocabulary", Level.NUMERICS, cases=by_length)
def draft_vocabulary(run: Run) -> None:
    """Each draft token is in the vocabulary, or -1."""
    _none_of(run, "vocabulary")


@check(Kind.DRAFTER, "drafter.draft.end", Level.NUMERICS, cases=by_length)
def draft_end(run: Run) -> None:
    """After the -1 that ends a proposal comes nothing but -1."""
    _none_of(run, "end")


@check(Kind.DRAFTER, "drafter.draft.parts", Level.NUMERICS)
def draft_parts(run: Run) -> None:
    """Probabilities and parents are there if they are declared, and only then."""
    _none_of(run, "parts")


def by_form(subject: Subject) -> Iterable[Case]:
    """Return the cases of `by_length` for each form in which trees are verified, but for that which is declared."""
    return [{**case, "form": form} for form in tree_forms(subject)[:-1] for case in by_length(subject)]


@check(Kind.DRAFTER, "drafter.tree.declared", Level.CONTRACT)
def tree_declared(run: Run) -> None:
    """A drafter that declares trees that differ between requests declares trees."""
    declared = run.subject.capabilities
    if declared.request_trees.support and not declared.tree.support:
        raise Failed("request_trees is declared without tree, and no tree of it is ever verified: declare both")


@check(Kind.DRAFTER, "drafter.tree.parents", Level.NUMERICS, needs={"tree": True}, cases=by_length)
def tree_parents(run: Run) -> None:
    """The parent of each node of a tree is a node before it, or -1. Trees that may differ have parents by request."""
    _none_of(run, "parents")


@check(Kind.DRAFTER, "drafter.tree.forms", Level.NUMERICS, needs={"tree": True}, cases=by_form)
def tree_forms_are_kept(run: Run) -> None:
    """Where less than the declared trees is verified, proposals have that form: one tree for all, or a path."""
    _none_of(run, "shape", "vocabulary", "end", "parts", "parents")


@check(Kind.DRAFTER, "drafter.probabilities.normalised", Level.NUMERICS, needs={"probabilities": True}, cases=by_length)
def probabilities_normalised(run: Run) -> None:
    """Probabilities have the shape [num_requests, num_tokens, vocab_size], are not negative, and sum to 1."""
    _none_of(run, "probabilities")


@check(Kind.DRAFTER, "drafter.draft.determinism", Level.NUMERICS, cost=0.2)
def draft_determinism(run: Run) -> None:
    """The same histories and the same draws give the same draft, from a new drafter and from a used one."""
    rng = run.rng
    requests = {row: random_request(rng, length=rng.choice((5, 20, 40))) for row in range(6)}
    first = world_of(run.subject, requests)
    reference = first.propose(range(6))
    for what, world in (("asked again", first), ("from a new drafter", world_of(run.subject, requests))):
        why = f"{what}; batch.uniforms is a drafter's only source of chance"
        same_drafts(requests, reference, world.propose(range(6)), why)
