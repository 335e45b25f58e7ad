"""Random traffic of requests with states, over slots of real memory."""

from __future__ import annotations

from random import Random

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.state_spec import Held, build_spec, state_cases
from slotline.testing.environments.state_traffic import NUM_ROWS, StateTraffic

NUM_REQUESTS = 12


@check(
    Kind.KV_SPEC,
    "kv_spec.state.traffic",
    Level.STATEFUL,
    needs={"state": True, "prefix_caching": True},
    cases=state_cases,
    explores=True,
    cost=0.3,
    profile="mixed",
)
def traffic(run: Run) -> None:
    """Requests share prefixes, leave checkpoints and continue from them under any budget, each with its own state."""
    held, rng = build_spec(run), run.rng
    found = StateTraffic(held, run.subject.device.type)
    waiting = _texts(held, rng)
    most = sum(len(tokens) for tokens, _ in waiting) + 1  # steps, as each computes a token of one request at least
    for _ in range(most):
        while waiting and len(found.requests) < NUM_ROWS:
            found.admit(*waiting.pop())
        if not found.requests:
            break
        found.step(rng)
    if found.requests or waiting:
        raise Failed(f"{len(found.requests) + len(waiting)} requests have not ended after {most} steps")
    run.measured["prefix_hits"] = found.hits


def _texts(held: Held, rng: Random) -> list[tuple[list[int], int]]:
    """Return texts and the lengths of their prompts. All begin with some of the first one's tokens."""
    longest = min(held.context.max_model_len, 6 * held.unit + 40)
    first = [rng.randrange(1000) for _ in range(longest)]
    texts = []
    for _ in range(NUM_REQUESTS):
        shared = rng.choice((longest, rng.randrange(longest), longest // 2))
        tokens = first[:shared] + [rng.randrange(1000) for _ in range(longest - shared)]
        texts.append((tokens, rng.randint(longest // 2, longest - 5)))
    return texts
