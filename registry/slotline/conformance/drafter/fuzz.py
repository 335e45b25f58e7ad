"""Random histories: requests come, grow by a few accepted tokens, sit out steps, are preempted, leave."""

from __future__ import annotations

from random import Random

from slotline.conformance.drafter.comparing import same_draft
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.drafter import Request, RowDraft, World, random_request, world_of

STEPS, LEAST_ROOM = 40, 10


@check(
    Kind.DRAFTER,
    "drafter.fuzz.traffic",
    Level.STATEFUL,
    cases=lambda subject: [{"history": n} for n in range(12 if subject.exhaustive else 3)],
    explores=True,
    cost=2.0,
    profile="mixed",
)
def fuzz_traffic(run: Run) -> None:
    """After any traffic the draft of each request is that of a new drafter which is shown its history at once."""
    rng = run.rng
    world = World(run.subject, garbage=rng.choice(("garbage", "tempting")), seed=run.seed)
    story: list[str] = []
    for _ in range(STEPS):
        _admit(world, rng, story)
        rows = [row for row in world.requests if rng.random() < 0.7]  # the others sit this step out
        rng.shuffle(rows)
        found = world.propose(rows)
        _compare(run, world, rows, found, story)
        for row in rows:
            _accept(world, rng, row, found[row], story)
        if not run.subject.capabilities.remembers:  # or a new drafter is no measure any more
            _leave(world, rng, story)
        elif any(len(request.tokens) + world.num_tokens + LEAST_ROOM > 64 for request in world.requests.values()):
            break


def _admit(world: World, rng: Random, story: list[str]) -> None:
    """Put requests on free rows, the most recently freed row first."""
    free = [row for row in reversed(range(world.max_requests)) if row not in world.requests]
    for row in free[: rng.randint(0, 2)]:
        request = random_request(rng, length=rng.randint(2, 20))
        world.admit(row, request)
        story.append(f"admit row {row}: {len(request.prompt)}+{len(request.output)} tokens")


def _accept(world: World, rng: Random, row: int, draft: RowDraft, story: list[str]) -> None:
    """Accept some of the draft and one more token, and sometimes more, as after a pause."""
    kept = _path(draft, rng.randint(0, len(draft.token_ids)))
    extra = rng.choice((1, 1, 1, 1 + world.num_tokens + rng.randint(1, 4)))
    request = world.requests[row]
    tokens = (*kept, *(rng.choice((rng.randrange(32), rng.choice(request.tokens))) for _ in range(extra)))
    world.requests[row] = request.then(tokens)
    story.append(f"row {row}: {len(draft.token_ids)} drafted, {len(tokens)} accepted")


def _path(draft: RowDraft, count: int) -> tuple[int, ...]:
    """Return the first `count` tokens of a chain, or those on the way to the last of `count` nodes of a tree."""
    if draft.parents is None:
        return draft.token_ids[:count]
    node, found = count - 1, list[int]()
    while node >= 0:
        found.append(draft.token_ids[node])
        node = draft.parents[node]
    return tuple(reversed(found))


def _leave(world: World, rng: Random, story: list[str]) -> None:
    """Finish requests, or preempt them and put them on another row."""
    for row, request in tuple(world.requests.items()):
        full = len(request.tokens) + world.num_tokens + LEAST_ROOM > world.max_model_len
        if world.steps is not None and not full and rng.random() < 0.05:
            world.preempt(row)
            story.append(f"row {row} is preempted and stays")
        if not full and rng.random() < 0.9:
            continue
        world.release(row)
        story.append(f"release row {row}")
        free = [other for other in range(world.max_requests) if other not in world.requests]
        if not full and rng.random() < 0.5:
            world.admit(rng.choice(free), request)
            story.append(f"its request comes back with {len(request.tokens)} tokens")


def _compare(run: Run, world: World, rows: list[int], found: dict[int, RowDraft], story: list[str]) -> None:
    moved: dict[int, Request] = {(row + 1) % world.max_requests: world.requests[row] for row in rows}
    expected = world_of(run.subject, moved, garbage="garbage").propose(sorted(moved))
    for row in rows:
        where = f"row {row}, history {list(world.requests[row].tokens)}"
        try:
            same_draft(expected[(row + 1) % world.max_requests], found[row], where)
        except Failed as failure:
            raise Failed(f"{failure}, from a new drafter; what went before: {'; '.join(story[-12:])}") from None
