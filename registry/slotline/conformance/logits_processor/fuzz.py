"""Random traffic: requests come, grow, have drafts refused, sit out steps, move to other rows, leave."""

from __future__ import annotations

from random import Random

from slotline.conformance.logits_processor.rows import compare
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.logits_processor import (
    MAX_MODEL_LEN,
    MOST_DRAFTS,
    Entry,
    World,
    examples,
    random_drafts,
    random_logits,
    random_request,
    verify_entries,
)

STEPS = 40


@check(
    Kind.LOGITS_PROCESSOR,
    "logits_processor.fuzz.traffic",
    Level.STATEFUL,
    cases=lambda subject: [{"history": n} for n in range(12 if subject.exhaustive else 3)],
    explores=True,
    cost=2.0,
    profile="mixed",
)
def fuzz_traffic(run: Run) -> None:
    """After any traffic each row's logits are those of a new processor that sees only this request.

    A sequential one is shown every place, some twice, and the new one the same places once.
    """
    rng = run.rng
    world = World(run.subject, garbage=rng.choice(("garbage", "tempting")), seed=run.seed)
    speculative = bool(run.subject.capabilities.speculation.support) and rng.random() < 0.8
    story: list[str] = []
    for _ in range(STEPS):
        _admit(world, rng, story)
        rows = [row for row in world.requests if rng.random() < 0.7]  # the others sit this step out
        rng.shuffle(rows)
        drafts = {row: random_drafts(rng, world.requests[row]) if speculative else () for row in rows}
        _step(world, rng, drafts, story, speculative)
        if world.subject.capabilities.sequential:
            rows = [row for row in rows if rng.random() < 0.8]  # the tokens of the others are thrown away
        for row in rows:
            _accept(world, rng, row, drafts[row], story)
        _leave(world, rng, story)


def _step(world: World, rng: Random, drafts: dict[int, tuple[int, ...]], story: list[str], speculative: bool) -> None:
    entries: list[Entry] = [entry for row, tokens in drafts.items() for entry in verify_entries(row, tokens)]
    if not entries:
        return
    logits = random_logits(rng, len(entries), world.subject.device.type, rng.choice(("plain", "ties", "bans", "large")))
    found = world.apply(entries, logits, speculative=speculative)
    try:
        compare(world, entries, logits, found, "from a processor that serves others too")
    except Failed as failure:
        raise Failed(f"{failure}; what went before: {'; '.join(story[-12:])}") from None


def _admit(world: World, rng: Random, story: list[str]) -> None:
    """Put requests on free rows, the most recently freed row first. One in five sets no parameters."""
    free = [row for row in reversed(range(world.max_requests)) if row not in world.requests]
    for row in free[: rng.randint(0, 2)]:
        settings = {} if rng.random() < 0.2 else rng.choice(examples(world.subject))
        request = random_request(rng, settings, length=rng.randint(1, 20))
        world.admit(row, request)
        story.append(f"admit row {row}: {request}")


def _accept(world: World, rng: Random, row: int, drafts: tuple[int, ...], story: list[str]) -> None:
    """Accept some of the drafts and one more token, and sometimes more, as after a pause."""
    kept = drafts[: rng.randint(0, len(drafts))]
    few = world.requests[row].tokens
    most = 1 if world.subject.capabilities.sequential else 3
    extra = [rng.choice((rng.randrange(32), rng.choice(few))) for _ in range(rng.choice((1, 1, 1, most)))]
    world.grow(row, (*kept, *extra))
    story.append(f"row {row}: {len(kept)} of {len(drafts)} drafts and {len(extra)} more accepted")


def _leave(world: World, rng: Random, story: list[str]) -> None:
    """Finish requests, or preempt them and put them on another row."""
    for row, request in tuple(world.requests.items()):
        full = len(request.tokens) + 2 * MOST_DRAFTS > MAX_MODEL_LEN
        if not full and rng.random() < 0.9:
            continue
        world.release(row)
        story.append(f"release row {row}")
        free = [other for other in range(world.max_requests) if other not in world.requests]
        if not full and not world.subject.capabilities.sequential and rng.random() < 0.5:
            other = rng.choice(free)
            world.admit(other, request)
            story.append(f"its request comes back on row {other} with {len(request.tokens)} tokens")
