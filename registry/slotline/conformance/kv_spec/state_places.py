"""Positions of checkpoints: the ends of steps, the states to keep, and the states to roll back."""

from __future__ import annotations

import numpy as np
from attrs import fields

from slotline.registry.contracts.kv_spec import UNDIVIDED
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.state_rules import Requests, keeps, requests_of, rolls_back, stops
from slotline.testing.environments.state_spec import build_spec, unit_cases

NEEDS = {"state": True, "prefix_caching": True}


@check(Kind.KV_SPEC, "kv_spec.state.stops.range", Level.NUMERICS, needs=NEEDS, cases=unit_cases, cost=0.02)
def stops_range(run: Run) -> None:
    """A step ends after the computed tokens and not after `ends`, and an undivided request is not cut."""
    held = build_spec(run)
    asked = requests_of(held, run.rng)
    found = stops(held, asked)
    wrong = (found <= asked.computed) | (found > asked.ends)
    for index in np.flatnonzero(wrong):
        raise Failed(f"stops is {found[index]}, which computes no token or too many: {asked.describe(index)}")
    for index in np.flatnonzero((asked.last == UNDIVIDED) & (found != asked.ends)):
        raise Failed(f"stops is {found[index]}, and the request may not be divided: {asked.describe(index)}")


@check(Kind.KV_SPEC, "kv_spec.state.stops.kept", Level.NUMERICS, needs=NEEDS, cases=unit_cases, cost=0.02)
def stops_kept(run: Run) -> None:
    """A step is cut short only where a state is then kept: where `keeps` says so, or at a multiple of the interval."""
    held = build_spec(run)
    asked = requests_of(held, run.rng, 600, divisible=True)
    found = stops(held, asked)
    reason = keeps(held, found, asked) | (found % held.spec.interval == 0)
    for index in np.flatnonzero((found < asked.ends) & ~reason):
        raise Failed(f"stops is {found[index]}, and keeps says that no state is kept there: {asked.describe(index)}")


@check(Kind.KV_SPEC, "kv_spec.state.keeps.units", Level.NUMERICS, needs=NEEDS, cases=unit_cases, cost=0.02)
def keeps_units(run: Run) -> None:
    """A state is kept only at a multiple of the prefix unit: no other prefix has a hash to find it by."""
    held = build_spec(run)
    asked = requests_of(held, run.rng, 600)
    computed = np.maximum(asked.computed, 1)
    wrong = keeps(held, computed, asked) & (computed % held.unit != 0)
    for index in np.flatnonzero(wrong):
        raise Failed(f"keeps is true at {computed[index]} tokens with units of {held.unit}: {asked.describe(index)}")


@check(Kind.KV_SPEC, "kv_spec.state.keeps.interval", Level.NUMERICS, needs=NEEDS, cases=unit_cases, cost=0.02)
def keeps_interval(run: Run) -> None:
    """While text is generated, no stretch of an interval's tokens goes by without a checkpoint."""
    held = build_spec(run)
    interval = int(held.spec.interval)
    if 3 * interval > held.context.max_model_len:
        raise NotApplicable(f"declared: an interval of {interval} tokens, too long for the suite")
    for prompt in (0, held.unit, interval - held.unit, interval):
        computed = np.arange(prompt + 1, held.context.max_model_len + 1, dtype=np.int64)
        last = np.full_like(computed, prompt)
        kept = computed[keeps(held, computed, Requests(computed, computed, last, last))]
        gaps = np.diff(np.concatenate(([prompt], kept, [held.context.max_model_len])))
        if gaps.max() > interval:
            raise Failed(
                f"behind a prompt of {prompt} tokens there are {gaps.max()} tokens without a checkpoint; the interval "
                f"is {interval}"
            )


@check(Kind.KV_SPEC, "kv_spec.state.rolls_back", Level.NUMERICS, cases=unit_cases, cost=0.01)
def goes_back(run: Run) -> None:
    """A state goes back exactly where not all tokens of the step count."""
    held = build_spec(run)
    pairs = [(counts, accepted) for counts in (*range(9), 64, 8192) for accepted in range(min(counts, 9) + 1)]
    pairs += [(64, 64), (8192, 8192)]
    run.rng.shuffle(pairs)
    counts, accepted = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    found = rolls_back(held, counts, accepted)
    for index in np.flatnonzero(found != (accepted < counts)):
        raise Failed(f"rolls_back is {found[index]} where {accepted[index]} of {counts[index]} tokens count")


@check(Kind.KV_SPEC, "kv_spec.state.answers.arguments", Level.HOSTILE, needs={"state": True}, cases=unit_cases)
def arguments_unchanged(run: Run) -> None:
    """The arrays that a rule is given are as they were once it has answered."""
    held = build_spec(run)
    asked = requests_of(held, run.rng)
    counts, accepted = asked.computed % 7 + 1, asked.ends % 2 + 1
    calls = {
        "stops": [getattr(asked, item.name) for item in fields(Requests)],
        "keeps": [np.maximum(asked.computed, 1), asked.last, asked.branch],
        "rolls_back": [counts, np.minimum(counts, accepted)],
    }
    for name, arrays in calls.items():
        given = [array.copy() for array in arrays]
        found = getattr(held.spec, name)(*given)
        if any(np.shares_memory(found, array) and name != "stops" for array in given):
            raise Failed(f"{name} returned memory of its arguments")
        for array, before in zip(given, arrays, strict=True):
            for index in np.flatnonzero(array != before):
                raise Failed(f"{name} changed its arguments, such as {before[index]} to {array[index]}")


@check(Kind.KV_SPEC, "kv_spec.state.answers.deterministic", Level.HOSTILE, needs=NEEDS, cases=unit_cases, cost=0.05)
def answers_deterministic(run: Run) -> None:
    """An answer depends on the request: not on others of the batch, on what was asked before, or on the object."""
    held, other, rng = build_spec(run), build_spec(run), run.rng
    asked = requests_of(held, rng, 100)
    computed = np.maximum(asked.computed, 1)
    expected_stops, expected_keeps = stops(other, asked), keeps(other, computed, asked)
    for index in rng.sample(range(100), 100):
        one = asked.one(index)
        found = int(stops(held, one)[0]), bool(keeps(held, np.maximum(one.computed, 1), one)[0])
        wanted = int(expected_stops[index]), bool(expected_keeps[index])
        if found != wanted:
            raise Failed(
                f"stops and keeps are {found} for a request that is asked about by itself, and {wanted} in a batch: "
                f"{asked.describe(index)}"
            )
