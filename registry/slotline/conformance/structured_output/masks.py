"""Masks compared with a search over the vocabulary, in benign surroundings."""

from __future__ import annotations

import numpy as np

from slotline.registry.descriptor import Kind
from slotline.registry.errors import RequestError
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.structured_output import (
    DOCUMENTS,
    EOS_TOKEN_IDS,
    WRONG,
    Mask,
    World,
    by_example,
    example_named,
    some_texts,
    takes,
    tokenizer,
)


@check(Kind.STRUCTURED_OUTPUT, "structured_output.mask.exact", Level.NUMERICS, cases=by_example, cost=1.0)
def mask_exact(run: Run) -> None:
    """After every token of some texts, cut in several ways, the mask allows what begins a text of the language."""
    world, example, rng = World(run.subject), example_named(run["example"]), run.rng
    for text in some_texts(example, rng, 5):
        state, sofar = world.start(example.constraint), b""
        world.expect(world.mask(state), example.language, sofar, run["example"])
        for token in world.split(example.constraint, text, rng):
            if state.accept([token]) != 1:
                raise Failed(f"{run['example']}: after {sofar!r}, the legal token {token} is not accepted")
            sofar = world.text([token]) if not sofar else sofar + world.text([token])
            world.expect(world.mask(state), example.language, sofar, run["example"])


@check(Kind.STRUCTURED_OUTPUT, "structured_output.mask.reusable", Level.NUMERICS, cases=by_example, cost=0.5)
def mask_reusable(run: Run) -> None:
    """Declared reusable, texts that go on alike have one mask, and a token's text is the one that masks see."""
    capabilities = run.subject.capabilities
    if not capabilities.reusable_masks:
        raise NotApplicable("not declared: masks that can be used again")
    world, example, rng = World(run.subject), example_named(run["example"]), run.rng
    known: dict[frozenset[bytes], tuple[bytes, Mask]] = {}
    for text in some_texts(example, rng, 8) * (3 if capabilities.every_tokenization else 1):
        state, sofar = world.start(example.constraint), b""
        for token in [None, *world.split(example.constraint, text, rng)]:
            if token is not None:
                state.accept([token])
                sofar += world.text([token])
            mask = world.mask(state)
            for index in np.flatnonzero(mask).tolist():
                seen = world.tokens[index]
                if index not in EOS_TOKEN_IDS and (told := world.backend.token_text(index)) != seen:
                    raise Failed(f"token_text of token {index} is {told!r}, masks see {seen!r}")
            if example.language.forced(sofar) and not capabilities.every_tokenization:
                continue  # then the mask may hang on the last token
            rest = frozenset(t.removeprefix(sofar) for t in example.language.texts if t.startswith(sofar))
            before, other = known.setdefault(rest, (sofar, mask))
            if (differs := mask != other).any():
                raise Failed(
                    f"{run['example']}: {before!r} and {sofar!r} go on alike, and their masks differ in "
                    f"{int(differs.sum())} tokens"
                )


@check(Kind.STRUCTURED_OUTPUT, "structured_output.state.finished", Level.NUMERICS, cases=by_example, cost=0.5)
def state_finished(run: Run) -> None:
    """A state is finished where its text is complete and no other text begins with it, and nowhere else."""
    world, example, rng = World(run.subject), example_named(run["example"]), run.rng
    for text in some_texts(example, rng, 8):
        state, sofar = world.start(example.constraint), b""
        for token in world.split(example.constraint, text, rng):
            state.accept([token])
            sofar += world.text([token])
            if bool(state.finished) is not example.language.over(sofar):
                raise Failed(f"{run['example']}: finished is {state.finished} after {sofar!r}")


@check(Kind.STRUCTURED_OUTPUT, "structured_output.state.forced", Level.NUMERICS, cases=by_example, cost=0.5)
def state_forced(run: Run) -> None:
    """The forced text begins every remaining text."""
    world, example, rng = World(run.subject), example_named(run["example"]), run.rng
    for text in some_texts(example, rng, 8):
        state, sofar = world.start(example.constraint), b""
        for token in [None, *world.split(example.constraint, text, rng)]:
            if token is not None:
                state.accept([token])
                sofar += world.text([token])
            forced = sofar + world.text(state.forced())
            wrong = [t for t in example.language.texts if t.startswith(sofar) and not t.startswith(forced)]
            if wrong and len(forced) > len(sofar):
                raise Failed(f"{run['example']}: {forced!r} is forced after {sofar!r}, {wrong[0]!r} is left too")


@check(Kind.STRUCTURED_OUTPUT, "structured_output.documents", Level.NUMERICS, cost=0.5)
def documents(run: Run) -> None:
    """Documents that a constraint allows are accepted to their end, others are not."""
    found = [case for case in DOCUMENTS if takes(run.subject, case[0])]
    if not found:
        raise NotApplicable("not declared: a constraint whose documents are known")
    world = World(run.subject)
    for constraint, right, wrong in found:
        for text in right + wrong:
            tokens, state = tokenizer().encode(text, add_special_tokens=False), world.start(constraint)
            whole = state.accept(tokens) == len(tokens) and bool(world.mask(state)[0])
            if whole is not (text in right):
                raise Failed(
                    f"{constraint.kind} {constraint.text}: {text} is {'accepted' if whole else 'not accepted'}"
                )


@check(Kind.STRUCTURED_OUTPUT, "structured_output.wrong_constraints", Level.NUMERICS, cost=0.2)
def wrong_constraints(run: Run) -> None:
    """Constraints that cannot be compiled are refused with RequestError, by check or compile, and the next is not."""
    world = World(run.subject)
    for constraint in (c for c in WRONG if takes(run.subject, c)):
        try:
            world.start(constraint)
        except RequestError:
            continue
        except Exception as error:  # whatever a plugin raises
            raise Failed(f"{constraint}: {type(error).__name__} instead of RequestError: {error}") from error
        raise Failed(f"{constraint} was compiled")
    example = example_named(by_first(run))
    world.expect(world.mask(world.start(example.constraint)), example.language, b"", "after refusals")


def by_first(run: Run) -> str:
    """Return the name of the first example that the plugin accepts."""
    name: str = next(iter(by_example(run.subject)))["example"]
    return name
