"""L3 of model families: long random traffic of texts that come, go, are cut and begin again."""

from __future__ import annotations

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, Run, check
from slotline.testing.environments.model_calls import KeptKeys
from slotline.testing.environments.model_family import FamilyWorld, Text, by_example, cuttable

STEPS, MOST, LENGTH = 50, 8, 30


@check(Kind.MODEL_FAMILY, "model_family.history.traffic", Level.STATEFUL, cases=by_example, explores=True, cost=2.0)
def traffic_gives_each_its_own(run: Run) -> None:
    """In random steps, where requests are preempted and begin again, each wanted token is that of its text alone."""
    world = FamilyWorld(run)
    model, rng = world.load(), run.rng
    known = [world.text(model, rng, rng.randint(1, LENGTH)) for _ in range(8)]
    expected = [world.whole(model, text) for text in known]
    cache, running, number = KeptKeys(model.facts), list[tuple[int, Text]](), 1000
    compared = 0
    for step in range(STEPS):
        while len(running) < MOST and rng.random() < 0.8:
            which, number = rng.randrange(len(known)), number + 1
            text = known[which].again()
            text.number = number
            running.append((which, text))
        if running and rng.random() < 0.1:
            _, gone = running.pop(rng.randrange(len(running)))
            cache.forget(gone.number)
        chosen = rng.sample(running, rng.randint(1, len(running))) if running else []
        if not chosen:
            continue
        parts, wanted, rows, start = [], list[int](), list[torch.Tensor](), 0
        for which, text in chosen:
            count = rng.choice((1, 1, rng.randint(1, text.left))) if cuttable(model.facts) else text.left
            parts.append((text, count))
            for place in sorted(rng.sample(range(count), rng.randint(0, min(2, count)))):
                wanted.append(start + place)
                rows.append(expected[which][text.computed + place])
            start += count
        found = world.step(model, cache, parts, wanted=wanted).float().cpu()
        if rows:
            world.compare(found, torch.stack(rows), f"step {step} of {start} tokens")
        compared += len(rows)
        for _, text in [pair for pair in chosen if not pair[1].left]:
            running = [pair for pair in running if pair[1] is not text]
            cache.forget(text.number)
    run.measured.update(compared=compared)
