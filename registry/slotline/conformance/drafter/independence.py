"""Independence of a proposal from everything but the request's own accepted history and draws."""

from __future__ import annotations

from slotline.conformance.drafter.comparing import must_forget, same_draft, same_drafts
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.drafter import Request, World, random_request, world_of

GARBAGE = ({"garbage": "garbage"}, {"garbage": "tempting"})


def _requests(run: Run, rows: range | tuple[int, ...] = range(6)) -> dict[int, Request]:
    rng = run.rng
    return {row: random_request(rng, length=(4, 9, 17, 30, 45, 60)[index % 6]) for index, row in enumerate(rows)}


@check(Kind.DRAFTER, "drafter.history.accepted_only", Level.HOSTILE, cost=0.05, cases=lambda _: GARBAGE)
def history_accepted_only(run: Run) -> None:
    """Values after the accepted history, or in rows that were not requested, do not change the draft."""
    requests = _requests(run)
    expected = world_of(run.subject, requests).propose(range(6))
    for seed in range(4):
        world = world_of(run.subject, requests, garbage=run["garbage"], seed=seed)
        what = "other garbage behind num_tokens, and the draft changes: it reads beyond the accepted history"
        same_drafts(requests, expected, world.propose(range(6)), what)


@check(Kind.DRAFTER, "drafter.on_device", Level.HOSTILE)
def on_device(run: Run) -> None:
    """With on_device, the host's numbers of tokens may be too large and its draws missing: the draft is the same."""
    if not run.subject.capabilities.on_device:
        raise NotApplicable("reads the host's tokens: on_device is not declared")
    if run.subject.capabilities.needs_history:
        raise Failed("declares on_device and needs_history: the history is on the host")
    requests = _requests(run)
    expected = world_of(run.subject, requests).propose(range(6))
    for ahead in (1, 2, 5):
        world = world_of(run.subject, requests, garbage="garbage", ahead=ahead)
        same_drafts(requests, expected, world.propose(range(6)), f"the host counts up to {ahead} tokens too many")


@check(Kind.DRAFTER, "drafter.batch.order", Level.HOSTILE)
def batch_order(run: Run) -> None:
    """Each request's draft is the same at every place in the batch."""
    requests, rng = _requests(run), run.rng
    expected = world_of(run.subject, requests, garbage="garbage").propose(range(6))
    for _ in range(4):
        order = rng.sample(range(6), 6)
        found = world_of(run.subject, requests, garbage="garbage").propose(order)
        same_drafts(requests, expected, found, f"rows in the order {order} instead of 0 to 5")


@check(Kind.DRAFTER, "drafter.batch.subset", Level.HOSTILE)
def batch_subset(run: Run) -> None:
    """A few of the requests, or a single one, get the same drafts as among all."""
    requests = _requests(run)
    expected = world_of(run.subject, requests, garbage="garbage").propose(range(6))
    for rows in ((0,), (5,), (4, 1), (2, 3, 0), (5, 4, 3, 2, 1)):
        found = world_of(run.subject, requests, garbage="garbage").propose(rows)
        same_drafts(requests, expected, found, f"only rows {list(rows)} asked for")


@check(Kind.DRAFTER, "drafter.batch.other_requests", Level.HOSTILE)
def batch_other_requests(run: Run) -> None:
    """Other requests in the batch, or none, or another row: the draft stays the same."""
    rng = run.rng
    for length in (5, 20, 50):
        request = random_request(rng, length=length)
        expected = world_of(run.subject, {2: request}, garbage="garbage").propose((2,))[2]
        for row in (0, 3, 5):
            others = {other: random_request(rng) for other in range(6) if other != row}
            world = world_of(run.subject, {**others, row: request}, garbage="garbage")
            world.propose([other for other in range(6) if other != row])
            found = world.propose(range(6))[row]
            where = f"history {list(request.tokens)}: in row {row} beside five others instead of row 2 alone"
            same_draft(expected, found, where)


def _used(run: Run) -> World:
    """Return a drafter of which each row has been used by another request."""
    rng = run.rng
    world = world_of(run.subject, {row: random_request(rng, length=30) for row in range(6)}, garbage="garbage")
    for _ in range(3):
        world.propose(range(6))
        for row, request in tuple(world.requests.items()):
            world.requests[row] = request.then((row, row + 1))
    return world


@check(
    Kind.DRAFTER,
    "drafter.rows.recycled",
    Level.HOSTILE,
    cost=0.05,
    cases=lambda _: ({"released": True}, {"released": False}),
)
def rows_recycled(run: Run) -> None:
    """A request that takes a used row gets the draft of an unused one, whether the row was released before or not."""
    if run["released"]:
        must_forget(run)
    world, requests = _used(run), _requests(run)
    expected = world_of(run.subject, requests, garbage="garbage").propose(range(6))
    for row, request in requests.items():
        if run["released"]:
            world.release(row)
        world.admit(row, request)
    same_drafts(requests, expected, world.propose(range(6)), "on a used row: admit must forget what the row held")


@check(Kind.DRAFTER, "drafter.rows.release", Level.HOSTILE)
def rows_release(run: Run) -> None:
    """After one request has left, one that never got a draft among them, the others' drafts are the same."""
    must_forget(run)
    rng, world = run.rng, _used(run)
    requests = dict(world.requests)
    expected = world_of(run.subject, requests, garbage="garbage").propose(range(6))
    for row in (3, 0, 5):
        world.release(row)
        del requests[row]
        world.admit(row, random_request(rng))
        world.release(row)  # it was aborted before its first step
        found = world.propose(sorted(requests))
        same_drafts(requests, expected, found, f"after the request of row {row} left")


@check(Kind.DRAFTER, "drafter.inputs.unchanged", Level.HOSTILE)
def inputs_unchanged(run: Run) -> None:
    """Nothing in the batch is written to, the garbage in the token table included."""
    import numpy as np
    import torch

    world = world_of(run.subject, _requests(run), garbage="garbage")
    for rows in (range(6), (3,), (5, 0)):
        batch = world.batch(rows)
        values = {name: getattr(batch, name) for name in type(batch).__slots__ if not name.startswith("__")}
        given = {name: torch.as_tensor(v) for name, v in values.items() if isinstance(v, torch.Tensor | np.ndarray)}
        before = {name: value.clone() for name, value in given.items()}
        world.drafter.propose(batch)
        for name, value in given.items():
            changed = (value != before[name]).nonzero().tolist()
            if changed:
                at = tuple(changed[0])
                raise Failed(f"batch.{name} was changed at {at}: {before[name][at]} became {value[at]}")


@check(Kind.DRAFTER, "drafter.rows.third", Level.HOSTILE, cost=0.1)
def rows_third(run: Run) -> None:
    """The third request of a row and those after it, equal ones and others, get the draft of an unused row."""
    must_forget(run)
    same, other = (random_request(run.rng, length=length) for length in (14, 23))
    used = World(run.subject, garbage="garbage")
    for number, request in enumerate((same, same, same, other, other, same), 1):
        used.admit(2, request)
        expected = world_of(run.subject, {2: request}, garbage="garbage").propose((2,))
        same_drafts({2: request}, expected, used.propose((2,)), f"as request {number} of the row")
        used.release(2)
