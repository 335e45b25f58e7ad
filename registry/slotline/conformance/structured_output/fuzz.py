"""Random texts, token by token, of requests that come and go."""

from __future__ import annotations

import numpy as np

from slotline.registry.contracts import GrammarState
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.structured_output import EOS_TOKEN_IDS, Example, World, declared


@check(Kind.STRUCTURED_OUTPUT, "structured_output.fuzz.traffic", Level.STATEFUL, cost=5.0, explores=True)
def fuzz_traffic(run: Run) -> None:
    """For any drawn legal tokens, among other requests and after tested drafts, masks equal those of a search."""
    world, rng = World(run.subject), run.rng
    examples = declared(run.subject)
    grammars = {example.name: world.backend.compile(example.constraint) for example in examples}
    running: list[tuple[Example, GrammarState, bytes]] = []
    steps = finished = 0
    while steps < 60:
        steps += 1
        while len(running) < 6:
            example = rng.choice(examples)
            running.append((example, world.backend.start(grammars[example.name]), b""))
        drafts = [
            [rng.randrange(world.vocab_size) for _ in range(rng.randint(0, 2))] if rng.random() < 0.3 else []
            for _ in running
        ]
        found = world.masks([state for _, state, _ in running], drafts)
        going = []
        for (example, state, sofar), masks in zip(running, found, strict=True):
            world.expect(masks[0], example.language, sofar, example.name)
            token = int(rng.choice(np.flatnonzero(masks[0]).tolist()))
            if token in EOS_TOKEN_IDS:
                finished += 1
                continue
            if state.accept([token]) != 1:
                raise Failed(f"{example.name}: after {sofar!r}, token {token} is allowed and not accepted")
            going.append((example, state, sofar + world.text([token])))
        running = going
    run.measured.update(texts=finished)
