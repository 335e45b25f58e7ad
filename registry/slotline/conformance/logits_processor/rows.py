"""A row's logits depend on its own request and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.logits_processor import (
    MAX_MODEL_LEN,
    MAX_REQUESTS,
    Entry,
    Request,
    World,
    alone,
    examples,
    random_logits,
    random_request,
    some_requests,
    world_of,
)
from slotline.testing.oracles.logits_processor import difference


def compare(world: World, entries: Sequence[Entry], logits: torch.Tensor, found: torch.Tensor, what: str) -> None:
    """Compare each entry's logits with those of a new processor for only this request, with accepted drafts.

    Raises:
        Failed: naming the row, the request and the first logit that differs.
    """
    for index, entry in enumerate(entries):
        request = world.requests[entry.row]
        earlier = world.earlier.get(entry.row)
        text = difference(alone(world.subject, request, logits[index], entry.drafts, earlier), found[index])
        if text is not None:
            drafts = f", draft position {len(entry.drafts)} behind {list(entry.drafts)}" if entry.drafts else ""
            raise Failed(f"row {entry.row}, place {index} of {len(entries)}{drafts}: {text}; {what}; {request}")


def check_rows(run: Run, world: World, rows: Sequence[int], what: str) -> None:
    """Run one step of these rows and compare it with each request by itself."""
    entries = [Entry(row) for row in rows]
    logits = random_logits(run.rng, len(entries), run.subject.device.type)
    compare(world, entries, logits, world.apply(entries, logits), what)


@check(Kind.LOGITS_PROCESSOR, "logits_processor.rows.together", Level.HOSTILE, cost=0.04)
def rows_together(run: Run) -> None:
    """Six requests in one batch get, bit for bit, the same as each by itself."""
    world = world_of(run.subject, some_requests(run.subject, run.rng), garbage="garbage")
    check_rows(run, world, range(MAX_REQUESTS), "in a batch of all rows instead of alone")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.rows.order", Level.HOSTILE, cost=0.05)
def rows_order(run: Run) -> None:
    """The order of the batch does not matter."""
    rng = run.rng
    world = world_of(run.subject, some_requests(run.subject, rng), garbage="garbage")
    for _ in range(4):
        order = rng.sample(range(MAX_REQUESTS), MAX_REQUESTS)
        check_rows(run, world, order, f"rows in the order {order}")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.rows.subset", Level.HOSTILE)
def rows_subset(run: Run) -> None:
    """A batch of some rows, or of one, gives them what a batch of all does."""
    world = world_of(run.subject, some_requests(run.subject, run.rng), garbage="garbage")
    for rows in ((0,), (5,), (4, 1), (2, 3, 0), (5, 4, 3, 2, 1)):
        check_rows(run, world, rows, f"only rows {list(rows)} in the batch")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.rows.without_work", Level.HOSTILE)
def rows_without_work(run: Run) -> None:
    """Requests without parameters are mixed in, and those without work are not shown to the processor."""
    rng = run.rng
    for silent in ({0, 2, 4}, {1, 5}, {0, 1, 2, 3, 4}):
        requests = some_requests(run.subject, rng)
        quiet = {row: Request({}, request.prompt, request.output) for row, request in requests.items() if row in silent}
        world = world_of(run.subject, {**requests, **quiet}, garbage="garbage")
        check_rows(run, world, range(MAX_REQUESTS), f"rows {sorted(silent)} set no parameter")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.rows.recycled", Level.HOSTILE, cost=0.06)
def rows_recycled(run: Run) -> None:
    """A request that takes a used row finds nothing of the one before it."""
    rng = run.rng
    world = world_of(run.subject, some_requests(run.subject, rng), garbage="garbage")
    for _ in range(4):
        check_rows(run, world, range(MAX_REQUESTS), "the rows were used before: admit must forget what they held")
        for row in range(MAX_REQUESTS):
            world.release(row)
        known = [*examples(run.subject), {}]
        for row in range(MAX_REQUESTS):
            world.admit(row, random_request(rng, rng.choice(known)))


@check(Kind.LOGITS_PROCESSOR, "logits_processor.rows.third_time", Level.HOSTILE, cost=0.06)
def rows_third_time(run: Run) -> None:
    """A row is used four times by requests with the same prompt, with other settings, and again with the first ones."""
    rng, known = run.rng, [*examples(run.subject), {}]
    first = random_request(rng, known[0], length=9)
    world = World(run.subject, garbage="garbage")
    for use in range(2 * max(len(known), 2)):
        for row in (0, 3):
            world.admit(row, Request(known[(use + row) % len(known)], first.prompt, first.output))
        check_rows(run, world, (3, 0), f"use {use} of the rows, by requests with equal tokens")
        for row in (0, 3):
            world.release(row)


@check(Kind.LOGITS_PROCESSOR, "logits_processor.rows.release", Level.HOSTILE)
def rows_release(run: Run) -> None:
    """Requests that leave, one that never had a step among them, do not change the others' logits."""
    rng = run.rng
    world = world_of(run.subject, some_requests(run.subject, rng), garbage="garbage")
    check_rows(run, world, range(MAX_REQUESTS), "first step")
    for row in (3, 0, 5):
        world.release(row)
        world.admit(row, random_request(rng, rng.choice(examples(run.subject))))
        world.release(row)  # it was aborted before its first step
        check_rows(run, world, sorted(world.requests), f"the request of row {row} left, and another after it")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.edge.one_row", Level.HOSTILE)
def edge_one_row(run: Run) -> None:
    """An engine for one request at a time, many requests one after the other."""
    rng, known = run.rng, examples(run.subject)
    world = World(run.subject, max_requests=1, garbage="garbage")
    for number in range(8):
        world.admit(0, random_request(rng, known[number % len(known)]))
        check_rows(run, world, (0,), "the only row of the engine")
        world.release(0)


@check(
    Kind.LOGITS_PROCESSOR,
    "logits_processor.edge.length",
    Level.HOSTILE,
    cases=lambda _: [{"tokens": tokens} for tokens in (1, 2, MAX_MODEL_LEN - 1)],
)
def edge_length(run: Run) -> None:
    """The shortest and the longest histories, in the first and the last row, with and without output tokens."""
    rng, known = run.rng, examples(run.subject)
    for settings in known:
        requests = {row: random_request(rng, settings, length=run["tokens"]) for row in (0, 5)}
        requests[2] = Request(settings, requests[0].tokens)  # no output yet
        world = world_of(run.subject, requests, garbage="garbage")
        check_rows(run, world, (5, 2, 0), f"histories of {run['tokens']} tokens")
