"""L1 of model families: calls of attention, forms of outputs, and the same numbers by every way of computing them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.model_calls import KeptKeys
from slotline.testing.environments.model_family import (
    LONGEST,
    FamilyWorld,
    by_example,
    examples_of,
    expect_shape,
    generating,
)
from slotline.testing.subject import Subject

ROUGH = 0.2
"""Largest part of an answer's length that another dtype may change. Wrong arithmetic changes all of it."""


def _dtypes(subject: Subject) -> Iterable[Case]:
    examples = examples_of(subject)
    return [{"example": name, "dtype": dtype} for name, one in examples.items() for dtype in one.dtypes]


@check(Kind.MODEL_FAMILY, "model_family.calls.layers", Level.NUMERICS, cases=_dtypes, cost=0.3)
def calls_are_as_declared(run: Run) -> None:
    """Each layer attends once and in order, with query, key and value of the shape and dtype that its facts say."""
    world = FamilyWorld(run)
    model = world.load(dtype=run["dtype"])
    cache = KeptKeys(model.facts, getattr(torch, run["dtype"]))
    text = world.text(model, run.rng, 9)
    hidden = world.step(model, cache, [(text, text.left)])
    if hidden.dtype != getattr(torch, run["dtype"]):
        raise Failed(f"the hidden states are {hidden.dtype}, the model was loaded in {run['dtype']}")
    if hidden.requires_grad:
        raise Failed("the hidden states require gradients")
    if not hidden.isfinite().all():
        raise Failed("the hidden states are not finite")


@check(Kind.MODEL_FAMILY, "model_family.calls.dtypes", Level.NUMERICS, cases=_dtypes, cost=0.4)
def dtypes_agree(run: Run) -> None:
    """The answers in each dtype are near those in the first one."""
    world = FamilyWorld(run)
    first = world.example.dtypes[0]
    if run["dtype"] == first:
        raise NotApplicable("it is what the others are compared with")
    if world.inspect().mixtures:
        raise NotApplicable("tokens go to other experts in another dtype")
    answers = []
    for dtype in (first, run["dtype"]):
        model = world.load(dtype=dtype)
        text = world.text(model, run.rng, 12)
        answers.append(world.answers(model, world.step(model, KeptKeys(model.facts), [(text, text.left)])))
    off = float((answers[1] - answers[0]).norm() / answers[0].norm())
    run.measure(error=off, allowed=ROUGH, what=f"answers in {run['dtype']}, as a part of their length")


@check(Kind.MODEL_FAMILY, "model_family.answers.logits", Level.NUMERICS, cases=generating, cost=0.3)
def logits_have_their_form(run: Run) -> None:
    """`compute_logits` gives float32 [n, vocab_size] row by row, and leaves the hidden states as they are."""
    world = FamilyWorld(run)
    model = world.load()
    hidden = world.step(model, KeptKeys(model.facts), [(text := world.text(model, run.rng, 7), text.left)])
    before = hidden.clone()
    with torch.inference_mode():
        logits = model.compute_logits(hidden)
        expect_shape("compute_logits", logits, (7, model.facts.vocab_size))
        if logits.dtype != torch.float32:
            raise Failed(f"the logits are {logits.dtype}, expected float32")
        if not torch.equal(before, hidden):
            raise Failed("compute_logits changed the hidden states that it was given")
        for rows in ([6], [0, 5], []):
            found = model.compute_logits(hidden[rows])
            expect_shape("compute_logits", found, (len(rows), model.facts.vocab_size))
            world.compare(found.cpu(), logits[rows].cpu(), f"logits of rows {rows} alone")


@check(Kind.MODEL_FAMILY, "model_family.answers.expected", Level.NUMERICS, cases=by_example, cost=0.6)
def answers_are_as_expected(run: Run) -> None:
    """The answers for whole texts are those of the example's own, independent computation."""
    world = FamilyWorld(run)
    if world.example.expected is None:
        raise NotApplicable("the example has nothing to compare with")
    model, rng = world.load(), run.rng
    for length in (1, 2, 13, LONGEST):
        text = world.text(model, rng, length)
        hidden = world.step(model, KeptKeys(model.facts), [(text, text.left)])
        expected = world.example.expected(world.folder(), text.tokens, text.item)
        world.compare(world.answers(model, hidden), expected.float().cpu(), f"a text of {length} tokens")


@check(Kind.MODEL_FAMILY, "model_family.answers.pooled", Level.NUMERICS, cases=by_example, cost=0.4)
def answers_are_pooled(run: Run) -> None:
    """The pooler gives float32 rows that are finite, one for each text, and the same for a text alone."""
    world = FamilyWorld(run)
    model = world.load()
    if world.example.task == "generate":
        raise NotApplicable("not declared: the example generates")
    from slotline.registry.contracts.pooling import PoolingParams

    params = model.pooler.adjust(PoolingParams())
    states = torch.stack([world.whole(model, world.text(model, run.rng, length))[-1] for length in (3, 8, 5)])
    states = states.to(world.device)
    with torch.inference_mode():
        together = model.pooler.pool(states, [params] * 3)
        alone = [model.pooler.pool(row[None], [params]) for row in states]
    if together.dim() != 2 or len(together) != 3 or together.dtype != torch.float32:
        raise Failed(f"pool returned {together.dtype} {list(together.shape)}, expected float32 [3, size]")
    if not together.isfinite().all():
        raise Failed("the pooled answers are not finite")
    for row, one in zip(together, alone, strict=True):
        world.compare(one.cpu(), row[None].cpu(), "a text alone")


@check(Kind.MODEL_FAMILY, "model_family.answers.weights", Level.NUMERICS, cases=by_example, cost=0.5)
def answers_follow_the_weights(run: Run) -> None:
    """The same folder gives the same numbers each time it is loaded, and other weights other numbers."""
    world = FamilyWorld(run)
    first, again, other = world.load(), world.load(), world.load(world.folder(1))
    text = world.text(first, run.rng, 11)
    found = world.whole(first, text)
    if not torch.equal(found, world.whole(again, text)):
        raise Failed("loading the folder twice gives different hidden states")
    if torch.allclose(found, world.whole(other, text), rtol=0.05, atol=0.0):
        raise Failed("a folder with other weights gives the same hidden states")


@check(Kind.MODEL_FAMILY, "model_family.answers.repeated", Level.NUMERICS, cases=by_example, cost=0.2)
def answers_are_repeated(run: Run) -> None:
    """The same step gives the same bits again: a model keeps nothing of the steps before."""
    world = FamilyWorld(run)
    model = world.load()
    text = world.text(model, run.rng, 10)
    first = world.whole(model, text)
    world.whole(model, world.text(model, run.rng, 3))
    if not torch.equal(first, world.whole(model, text)):
        raise Failed("the same step gave other hidden states after another one")


@check(Kind.MODEL_FAMILY, "model_family.answers.embed", Level.NUMERICS, cases=by_example, cost=0.2)
def embeddings_stand_for_tokens(run: Run) -> None:
    """`embed` gives a row of its own for each token, and the forward pass of these rows is that of the tokens."""
    world = FamilyWorld(run)
    model, facts = world.load(), world.inspect()
    if getattr(model, "embed", None) is None:
        raise NotApplicable("not declared: the model has no embed")
    if any(m.cross or m.raw for m in facts.modalities):
        raise NotApplicable("not declared: its steps never give embeddings")
    text = world.text(model, run.rng, 9)
    ids = torch.tensor(text.tokens, device=world.device)
    with torch.inference_mode():
        rows = model.embed(ids)
        expect_shape("embed", rows, (9, facts.hidden_size))
        kept = rows.clone()
        rows.fill_(float("nan"))  # the caller may
        if not torch.equal(model.embed(ids), kept):
            raise Failed("embed gives other rows after the caller has overwritten those of the first call")
    chained = facts.parts is None or facts.parts.chained
    plain = any(not (m.cross or m.raw) for m in facts.modalities)
    if not (plain or (run.subject.capabilities.prompt_embeds.support and chained)):
        return
    embedded = text.again()
    embedded.embeds = kept
    if chained:  # then no layer reads token ids
        embedded.tokens = text.tokens[::-1]
    world.compare(world.whole(model, embedded), world.whole(model, text), "the same text as embeddings")
