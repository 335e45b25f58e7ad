"""Under speculation a request's row comes several times in one batch, once for each number of drafts assumed."""

from __future__ import annotations

from slotline.conformance.logits_processor.rows import compare
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.logits_processor import (
    Entry,
    random_drafts,
    random_logits,
    some_requests,
    verify_entries,
    world_of,
)
from slotline.testing.oracles.logits_processor import difference

NEEDS = {"speculation": True}


@check(Kind.LOGITS_PROCESSOR, "logits_processor.speculation.positions", Level.NUMERICS, needs=NEEDS)
def speculation_positions(run: Run) -> None:
    """At each draft position the logits are those of a request that has really got the drafts before it."""
    rng = run.rng
    for _ in range(3):
        for request in some_requests(run.subject, rng).values():
            world = world_of(run.subject, {1: request})
            entries = verify_entries(1, random_drafts(rng, request))
            logits = random_logits(rng, len(entries), run.subject.device.type)
            found = world.apply(entries, logits, speculative=True)
            compare(world, entries, logits, found, "wanted what the accepted drafts would give")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.speculation.no_drafts", Level.NUMERICS, needs=NEEDS)
def speculation_no_drafts(run: Run) -> None:
    """A step of a speculative run in which no request has drafts is like a step without speculation."""
    rng = run.rng
    requests = some_requests(run.subject, rng)
    entries = [Entry(row) for row in requests]
    logits = random_logits(rng, len(entries), run.subject.device.type)
    expected = world_of(run.subject, requests).apply(entries, logits, speculative=False)
    found = world_of(run.subject, requests).apply(entries, logits, speculative=True)
    for index, entry in enumerate(entries):
        text = difference(expected[index], found[index])
        if text is not None:
            raise Failed(f"row {entry.row}, draft_token_ids of width 0: {text}; {requests[entry.row]}")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.speculation.mixed", Level.HOSTILE, needs=NEEDS)
def speculation_mixed(run: Run) -> None:
    """Rows with several drafts, with one and with none, in any order, garbage in the table where the drafts will go."""
    rng = run.rng
    for garbage in ("garbage", "tempting"):
        requests = some_requests(run.subject, rng)
        world = world_of(run.subject, requests, garbage=garbage)
        entries = [e for row, request in requests.items() for e in verify_entries(row, random_drafts(rng, request))]
        for _ in range(3):
            logits = random_logits(rng, len(entries), run.subject.device.type)
            found = world.apply(entries, logits, speculative=True)
            compare(world, entries, logits, found, f"rows {[entry.row for entry in entries]} in one batch")
            rng.shuffle(entries)


@check(Kind.LOGITS_PROCESSOR, "logits_processor.speculation.one_position", Level.HOSTILE, needs=NEEDS)
def speculation_one_position(run: Run) -> None:
    """A single draft position, without the ones before it in the batch, gives the same."""
    rng = run.rng
    requests = some_requests(run.subject, rng)
    drafts = {row: random_drafts(rng, request) for row, request in requests.items()}
    world = world_of(run.subject, requests, garbage="tempting")
    entries = [Entry(row, drafts[row]) for row in requests]
    logits = random_logits(rng, len(entries), run.subject.device.type)
    found = world.apply(entries, logits, speculative=True)
    compare(world, entries, logits, found, "only the position behind the last draft of each row")
