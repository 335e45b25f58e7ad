"""Masks in surroundings that expose a wrong read or write: drafts, other rows, tokens that are not text, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random

from slotline.registry.contracts import Constraint
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.structured_output import (
    EOS_TOKEN_IDS,
    Example,
    World,
    by_example,
    declared,
    example_named,
    some_texts,
    takes,
    tokenizer,
)


def _drafts(world: World, example: Example, rng: Random) -> tuple[list[int], list[int]]:
    """Return the tokens of a text: those before some position, and the drafts after it."""
    tokens = world.split(example.constraint, some_texts(example, rng, 1)[0], rng)
    cut = rng.randint(0, len(tokens))
    return tokens[:cut], tokens[cut:]


@check(Kind.STRUCTURED_OUTPUT, "structured_output.mask.drafts", Level.HOSTILE, cases=by_example, cost=0.5)
def mask_drafts(run: Run) -> None:
    """The mask after each draft is the same as once it is accepted, and the state does not change."""
    world, example, rng = World(run.subject), example_named(run["example"]), run.rng
    for _ in range(6):
        known, drafts = _drafts(world, example, rng)
        state = world.start(example.constraint)
        state.accept(known)
        found, sofar = world.masks([state], [drafts])[0], world.text(known)
        for count, mask in enumerate(found):
            text = sofar + world.text(drafts[:count])
            world.expect(mask, example.language, text, f"{run['example']}, behind {count} drafts")
        world.expect(world.mask(state), example.language, sofar, f"{run['example']}, after drafts were walked")


@check(Kind.STRUCTURED_OUTPUT, "structured_output.mask.wrong_drafts", Level.HOSTILE, cases=by_example, cost=0.5)
def mask_wrong_drafts(run: Run) -> None:
    """Drafts that are not legal, or that end the text, change neither the masks before them nor the state."""
    world, example, rng = World(run.subject), example_named(run["example"]), run.rng
    for wrong in (*EOS_TOKEN_IDS, 1, rng.randrange(8, world.vocab_size)):
        known, drafts = _drafts(world, example, rng)
        state = world.start(example.constraint)
        state.accept(known)
        place = rng.randint(0, len(drafts))
        assumed = [*drafts[:place], wrong, *drafts[place:]]
        for count, mask in enumerate(world.masks([state], [assumed])[0][: place + 1]):
            text = world.text(known + drafts[:count])
            world.expect(mask, example.language, text, f"{run['example']}, drafts {assumed}")
        world.expect(world.mask(state), example.language, world.text(known), f"{run['example']}, after {assumed}")


@check(Kind.STRUCTURED_OUTPUT, "structured_output.state.count_legal", Level.HOSTILE, cases=by_example, cost=0.5)
def state_count_legal(run: Run) -> None:
    """count_legal says how many tokens `accept` takes, counts the end where it is legal, and changes nothing."""
    world, example, rng = World(run.subject), example_named(run["example"]), run.rng
    for _ in range(6):
        known, rest = _drafts(world, example, rng)
        state = world.start(example.constraint)
        state.accept(known)
        for wrong, legal in ((None, False), (1, False), (EOS_TOKEN_IDS[0], True)):
            asked = rest if wrong is None else [*rest, wrong, wrong]
            want = len(rest) + legal
            if (found := state.count_legal(asked)) != want:
                raise Failed(f"{run['example']}: count_legal({asked}) after {known} is {found}, wanted {want}")
        world.expect(world.mask(state), example.language, world.text(known), f"{run['example']}, after count_legal")
        if (taken := state.accept(rest)) != len(rest):
            raise Failed(f"{run['example']}: accept({rest}) after {known} took {taken}")
        if state.accept([1]) != 0:
            raise Failed(f"{run['example']}: a special token was accepted as text")


@check(Kind.STRUCTURED_OUTPUT, "structured_output.batch.others", Level.HOSTILE, cost=1.0)
def batch_others(run: Run) -> None:
    """Requests of all constraints together, in any order, get the same masks as each by itself."""
    world, rng = World(run.subject), run.rng
    entries = []
    for example in declared(run.subject) * 2:
        known, drafts = _drafts(world, example, rng)
        state = world.start(example.constraint)
        state.accept(known)
        entries.append((example, state, known, drafts))
    for _ in range(3):
        rng.shuffle(entries)
        found = world.masks([state for _, state, _, _ in entries], [drafts for _, _, _, drafts in entries])
        for (example, _, known, drafts), masks in zip(entries, found, strict=True):
            for count, mask in enumerate(masks):
                world.expect(mask, example.language, world.text(known + drafts[:count]), example.name)


@check(Kind.STRUCTURED_OUTPUT, "structured_output.vocabulary.padding", Level.HOSTILE, cases=by_example, cost=1.0)
def vocabulary_padding(run: Run) -> None:
    """Logits wider or narrower than the tokenizer: no token that it lacks is allowed, the others as ever."""
    example, rng = example_named(run["example"]), run.rng
    for vocab_size in (len(tokenizer()) + 39, len(tokenizer()) - 1000):
        world = World(run.subject, vocab_size)
        state = world.start(example.constraint)
        world.expect(world.mask(state), example.language, b"", f"vocab_size {vocab_size}")
        known, drafts = _drafts(world, example, rng)
        state.accept(known)
        for count, mask in enumerate(world.masks([state], [drafts])[0]):
            world.expect(mask, example.language, world.text(known + drafts[:count]), f"vocab_size {vocab_size}")


@check(Kind.STRUCTURED_OUTPUT, "structured_output.vocabulary.special", Level.HOSTILE, cost=0.3)
def vocabulary_special(run: Run) -> None:
    """Special tokens and those that the tokenizer lacks are illegal, even if any text is allowed."""
    free = (Constraint("regex", "(.|\\n)*"), Constraint("json", '{"type": "string"}'))
    asked = [constraint for constraint in free if takes(run.subject, constraint)]
    if not asked:
        raise NotApplicable("not declared: a constraint that allows any text")
    world = World(run.subject, len(tokenizer()) + 39)
    quote = tokenizer().encode('"', add_special_tokens=False)
    for constraint in asked:
        state = world.start(constraint)
        if constraint.kind == "json":
            state.accept(quote)
        mask = world.mask(state)
        wrong = [t for t, text in enumerate(world.tokens) if text is None and t not in EOS_TOKEN_IDS and mask[t]]
        if wrong:
            raise Failed(f"{constraint}: tokens {wrong[:8]} are allowed, which are no text")
        if mask.sum() < len(tokenizer()) // 2:
            raise Failed(f"{constraint}: {int(mask.sum())} tokens are allowed of {len(tokenizer())}")


@check(Kind.STRUCTURED_OUTPUT, "structured_output.states.apart", Level.HOSTILE, cases=by_example, cost=0.5)
def states_apart(run: Run) -> None:
    """States of one compiled grammar do not see each other's tokens."""
    world, example, rng = World(run.subject), example_named(run["example"]), run.rng
    grammar = world.backend.compile(example.constraint)
    first, second = world.backend.start(grammar), world.backend.start(grammar)
    tokens = world.split(example.constraint, some_texts(example, rng, 1)[0], rng)
    first.accept(tokens)
    world.expect(world.mask(second), example.language, b"", "a state beside one that advanced")
    world.expect(world.mask(world.backend.start(grammar)), example.language, b"", "a state begun later")
    world.expect(world.mask(first), example.language, world.text(tokens), "the state that advanced")


@check(Kind.STRUCTURED_OUTPUT, "structured_output.compile.threads", Level.HOSTILE, cost=1.0)
def compile_threads(run: Run) -> None:
    """Constraints compiled at the same time in several threads are as if compiled one by one."""
    world, examples = World(run.subject), declared(run.subject) * 4
    with ThreadPoolExecutor(4) as pool:
        grammars = list(pool.map(lambda example: world.backend.compile(example.constraint), examples))
    for example, grammar in zip(examples, grammars, strict=True):
        world.expect(world.mask(world.backend.start(grammar)), example.language, b"", example.name)


@check(Kind.STRUCTURED_OUTPUT, "structured_output.grammars.third", Level.HOSTILE, cases=by_example, cost=0.3)
def grammars_third(run: Run) -> None:
    """States of a compiled grammar that follow one another, and the constraint compiled again, begin from nothing."""
    world, example, rng = World(run.subject), example_named(run["example"]), run.rng
    tokens = world.split(example.constraint, some_texts(example, rng, 1)[0], rng)
    for compilation in range(1, 5):
        grammar = world.backend.compile(example.constraint)
        for use in range(1, 5 if compilation == 1 else 2):
            where = f"{run['example']}, compiled {compilation} times, state {use} of it"
            state = world.backend.start(grammar)
            world.expect(world.mask(state), example.language, b"", where)
            state.accept(tokens)
            world.expect(world.mask(state), example.language, world.text(tokens), where)
            del state
