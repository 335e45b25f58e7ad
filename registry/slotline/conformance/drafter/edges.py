"""Batches at the edges: none, one, the shortest and the longest histories."""

from __future__ import annotations

from slotline.conformance.drafter.comparing import must_forget, same_draft, same_drafts
from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, Run, check
from slotline.testing.environments.drafter import Request, World, random_request, world_of


@check(Kind.DRAFTER, "drafter.edge.no_requests", Level.HOSTILE)
def edge_no_requests(run: Run) -> None:
    """A step in which no request gets drafts: zero rows come back, and the next step is as always."""
    rng = run.rng
    requests = {row: random_request(rng) for row in range(6)}
    expected = world_of(run.subject, requests, garbage="garbage").propose(range(6))
    world = World(run.subject, garbage="garbage")
    world.propose(())  # before any request came
    for row, request in requests.items():
        world.admit(row, request)
    world.propose(())
    same_drafts(requests, expected, world.propose(range(6)), "after a step without requests")


@check(
    Kind.DRAFTER,
    "drafter.edge.short_prompt",
    Level.HOSTILE,
    cases=lambda _: [{"prompt": prompt} for prompt in (1, 2, 3, 4)],
)
def edge_short_prompt(run: Run) -> None:
    """Prompts of one to four tokens, right after their first output token, with and without long ones."""
    rng = run.rng
    for repeated in (True, False):
        prompt = tuple(5 if repeated else rng.randrange(32) for _ in range(run["prompt"]))
        request = Request(prompt, (5,), seed=rng.randrange(2**31), temperature=1.0)
        alone = world_of(run.subject, {0: request}, garbage="garbage").propose((0,))[0]
        beside = {1: random_request(rng, length=50), 2: request}
        found = world_of(run.subject, beside, garbage="garbage").propose((1, 2))[2]
        same_draft(alone, found, f"history {list(request.tokens)}: beside a history of 50 tokens instead of alone")


@check(
    Kind.DRAFTER,
    "drafter.edge.full_row",
    Level.HOSTILE,
    cases=lambda _: [{"room": room} for room in (1, 2, 3, 8)],
)
def edge_full_row(run: Run) -> None:
    """Histories that leave 1 to 8 places up to max_model_len, in the first and in the last row of the table."""
    rng, length = run.rng, 64 - run["room"]
    requests = {row: random_request(rng, length=length) for row in (0, 5)}
    expected = world_of(run.subject, requests, garbage="garbage").propose((0, 5))
    found = world_of(run.subject, requests, garbage="tempting").propose((0, 5))
    same_drafts(requests, expected, found, f"with room for {run['room']} more tokens and other garbage")


@check(Kind.DRAFTER, "drafter.edge.one_row", Level.HOSTILE)
def edge_one_row(run: Run) -> None:
    """An engine for one request at a time, many requests one after the other."""
    must_forget(run)
    rng, world = run.rng, World(run.subject, max_requests=1, garbage="garbage")
    for _ in range(8):
        request = random_request(rng)
        world.admit(0, request)
        found = world.propose((0,))[0]
        fresh = world_of(run.subject, {0: request}, max_requests=1, garbage="garbage").propose((0,))[0]
        same_draft(fresh, found, f"history {list(request.tokens)}: after others on the only row")
        world.release(0)
