"""Inputs that a processor may read, and no writes except to the logits."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.logits_processor import (
    MAX_REQUESTS,
    Entry,
    random_drafts,
    random_logits,
    some_requests,
    verify_entries,
    world_of,
)
from slotline.testing.oracles.logits_processor import difference


@check(
    Kind.LOGITS_PROCESSOR,
    "logits_processor.history.known_only",
    Level.HOSTILE,
    cases=lambda _: ({"garbage": "garbage"}, {"garbage": "tempting"}),
    cost=0.02,
)
def history_known_only(run: Run) -> None:
    """Values after num_tokens or in free rows change nothing, nor do output tokens without needs_history."""
    rng = run.rng
    requests = some_requests(run.subject, rng, (0, 2, 3, 5))
    entries = [Entry(row) for row in requests]
    logits = random_logits(rng, len(entries), run.subject.device.type)
    expected = world_of(run.subject, requests).apply(entries, logits)
    for seed in range(4):
        world = world_of(run.subject, requests, garbage=run["garbage"], seed=seed)
        found = world.apply(entries, logits)
        for index, entry in enumerate(entries):
            text = difference(expected[index], found[index])
            if text is not None:
                raise Failed(
                    f"row {entry.row}: {text}, with other garbage where no token is known: it reads beyond num_tokens, "
                    f"in another row, or output tokens without needs_history; {requests[entry.row]}"
                )


@check(Kind.LOGITS_PROCESSOR, "logits_processor.inputs.unchanged", Level.HOSTILE, cost=0.03)
def inputs_unchanged(run: Run) -> None:
    """Nothing in the batch is written to, the token table least of all."""
    rng, speculative = run.rng, bool(run.subject.capabilities.speculation.support)
    requests = some_requests(run.subject, rng)
    world = world_of(run.subject, requests, garbage="garbage")
    for rows in (range(MAX_REQUESTS), (3,), (5, 0)):
        entries = []
        for row in rows:
            drafts = random_drafts(rng, requests[row]) if speculative else ()
            entries += verify_entries(row, drafts) if world.shows(row) else []
        if not entries:
            continue
        logits = random_logits(rng, len(entries), run.subject.device.type)
        batch = world.batch(entries, logits, speculative=speculative)
        arrays = {name: getattr(batch, name) for name in type(batch).__slots__ if not name.startswith("__")}
        before = {name: deepcopy(array) for name, array in arrays.items() if array is not None}
        world.processor.apply(logits, batch)
        for name, array in before.items():
            now = getattr(batch, name)
            if now is not arrays[name]:
                raise Failed(f"batch.{name} was replaced")
            changed = np.argwhere(np.asarray(now != array if isinstance(now, np.ndarray) else (now != array).cpu()))
            if len(changed):
                at = tuple(int(i) for i in changed[0])
                raise Failed(f"batch.{name}{list(at)} was changed: {array[at]} became {now[at]}")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.logits.not_kept", Level.HOSTILE)
def logits_not_kept(run: Run) -> None:
    """The logits of one step stay as they are when the next step runs: no buffer is handed out twice."""
    rng = run.rng
    world = world_of(run.subject, some_requests(run.subject, rng), garbage="garbage")
    shown = [Entry(row) for row in range(MAX_REQUESTS) if world.shows(row)]
    if not shown:
        return
    device = run.subject.device.type
    plain, ties = (random_logits(rng, len(shown), device, form) for form in ("plain", "ties"))
    first = world.processor.apply(plain, world.batch(shown, plain, speculative=False))
    kept = first.clone()
    world.processor.apply(ties, world.batch(shown, ties, speculative=False))
    if not torch.equal(first, kept):
        raise Failed(
            "the logits that one apply returned were overwritten by the next: results need memory of their own"
        )
