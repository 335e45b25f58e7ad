"""Comparison of a drafter's stated probabilities with the distribution of its draws.

**The tests.** 16 histories (8 at each of two temperatures) get 250 drafts of up to three tokens each, with fresh
`uniforms`. Draft tokens are grouped by history and by the draft tokens before them, since each is drawn from its own
conditional distribution. A group's expected counts are the sum of the stated probabilities. Pearson's chi-square
statistics of all groups with at least 20 draws are added and compared with the chi-square distribution of their joint
degrees of freedom, at level `SIGNIFICANCE`. A second statistic counts over all groups how often the likeliest token was
drawn, the next likely and so on. It has few degrees of freedom and detects distributions that are all a little too
sharp or too flat. If a token with probability zero is drawn, the test fails immediately. Seeds are fixed, so the answer
does not change from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.drafter import Request, World, draft_lengths, random_request, world_of
from slotline.testing.oracles.drafter import SIGNIFICANCE, Array, chi_square

HISTORIES, DRAWS, VOCABULARY, LEAST_GROUP = 8, 250, 8, 20
PROBABILITIES = {"probabilities": True}

_Group = tuple[int, tuple[int, ...]]  # history, draft tokens before
_Counts = tuple[Array, Array]  # drawn, expected


@check(Kind.DRAFTER, "drafter.probabilities.possible", Level.NUMERICS, needs=PROBABILITIES)
def probabilities_possible(run: Run) -> None:
    """No draft token has probability zero, whatever the draw, its least and its greatest value included."""
    least, greatest = 0.0, float(np.nextafter(1.0, 0.0))
    rng = run.rng
    for uniform in (least, greatest, 0.5):
        requests = {row: random_request(rng, temperature=(0.0, 0.3, 1.0)[row % 3]) for row in range(6)}
        world = _FixedDraws(run.subject, uniform=uniform)
        for row, request in requests.items():
            world.admit(row, request)
        for row, draft in world.propose(range(6)).items():
            for position, token in enumerate(draft.token_ids):
                assert draft.probabilities is not None
                if not draft.probabilities[position, token] > 0:
                    raise Failed(
                        f"row {row}, temperature {requests[row].temperature}, uniform {uniform!r}: draft position "
                        f"{position} proposes token {token}, to which it gives probability 0"
                    )


@define
class _FixedDraws(World):
    """Hands out one and the same uniform number everywhere."""

    uniform: float = 0.5

    def _uniforms(self, requests: Sequence[Request]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.full((len(requests), self.num_tokens), self.uniform)


@check(Kind.DRAFTER, "drafter.probabilities.honest", Level.NUMERICS, needs=PROBABILITIES, cost=2.0, profile="sampling")
def probabilities_honest(run: Run) -> None:
    """Draft tokens follow the stated probabilities, each given the draft tokens before it (two chi-square tests)."""
    groups, ranks = _counted(run)
    usual = {key: counts for key, counts in groups.items() if counts[0].sum() >= LEAST_GROUP}
    for what, result in (("by context", chi_square(usual)), ("by rank", chi_square({0: ranks}))):
        run.measured.update({f"p_value {what}": result.p_value, f"statistic {what}": result.statistic})
        if result.p_value < SIGNIFICANCE:
            key, (seen, wanted) = max(groups.items(), key=lambda item: float(np.abs(item[1][0] - item[1][1]).max()))
            raise Failed(
                f"drawn tokens do not follow the stated probabilities: {what}, chi-square {result.statistic:.0f} with "
                f"{result.freedom} degrees of freedom, p = {result.p_value:.1g} < {SIGNIFICANCE}. Likeliest to least "
                f"likely: drawn {_shown(ranks[0])}, expected {_shown(ranks[1])}. Worst: history {key[0]} after draft "
                f"tokens {list(key[1])}: drawn {_shown(seen)}, expected {_shown(wanted)}"
            )


def _counted(run: Run) -> tuple[dict[_Group, _Counts], _Counts]:
    """Return drawn and expected counts of each token by context, and of the likeliest, the next and so on over all."""
    rng = run.rng
    groups: dict[_Group, _Counts] = {}
    ranks = np.zeros(VOCABULARY), np.zeros(VOCABULARY)
    for case, temperature in enumerate((1.0, 0.6)):
        requests = {
            row: random_request(rng, vocab_size=VOCABULARY, length=6 + 3 * row, temperature=temperature)
            for row in range(HISTORIES)
        }
        length = draft_lengths(run.subject, up_to=3)[-1]
        sizes = {"vocab_size": VOCABULARY, "max_requests": HISTORIES, "num_tokens": length}
        world = world_of(run.subject, requests, **sizes)
        for repeat in range(DRAWS):
            for row, request in requests.items():  # new draws for the same history
                world.requests[row] = Request(request.prompt, request.output, request.seed + repeat, temperature)
            for row, draft in world.propose(range(HISTORIES)).items():
                assert draft.probabilities is not None
                for position, (token, stated) in enumerate(
                    zip(draft.token_ids, draft.probabilities.numpy(), strict=True)
                ):
                    context = (case * HISTORIES + row, draft.token_ids[:position])
                    seen, wanted = groups.setdefault(context, (np.zeros(VOCABULARY), np.zeros(VOCABULARY)))
                    seen[token] += 1
                    wanted += stated
                    order = np.argsort(-stated, kind="stable")
                    ranks[0][order.tolist().index(token)] += 1
                    ranks[1][:] += stated[order]
    return groups, ranks


def _shown(counts: Array) -> list[int]:
    return [round(count) for count in counts.tolist()]
