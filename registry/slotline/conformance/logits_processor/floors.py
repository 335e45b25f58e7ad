"""Floors: a processor that lets the sampler do its work must declare the same floor that `apply` applies."""

from __future__ import annotations

import math
from typing import Any

import torch

from slotline.core import SamplingParams
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.logits_processor import (
    Entry,
    Settings,
    World,
    by_example,
    examples,
    parameters,
    random_logits,
    random_request,
)
from slotline.testing.oracles.logits_processor import floor_fault

NEEDS = {"floors": True}
TEMPERATURES = (0.3, 1.0, 2.5)


def by_temperature(subject: Any) -> list[Case]:
    """Return each example at each temperature."""
    return [{**case, "temperature": temperature} for case in by_example(subject) for temperature in TEMPERATURES]


def floor_of(world: World, params: dict[str, Any]) -> float:
    """Return the processor's floor, after calling it twice.

    Raises:
        Failed: if the answer is not a floor.
    """
    first, again = (world.processor.floor(params) for _ in range(2))
    if not isinstance(first, float | int) or math.isnan(first) or first > 0:
        raise Failed(f"floor returned {first!r}, wanted a number of 0 or below, or minus infinity")
    if first != again:
        raise Failed(f"floor returned {first} and then {again} for the same parameters")
    return float(first)


@check(Kind.LOGITS_PROCESSOR, "logits_processor.floors.same", Level.NUMERICS, needs=NEEDS, cases=by_temperature)
def floors_same(run: Run) -> None:
    """At any temperature `apply` keeps the tokens that `floor` names, and leaves their logits as they were."""
    settings: Settings = {**examples(run.subject)[run["example"]], "temperature": run["temperature"]}
    rng, world = run.rng, World(run.subject)
    for form in ("plain", "ties", "bans", "large"):
        request = random_request(rng, settings)
        floor = floor_of(world, parameters(settings))
        world.admit(0, request)
        if not world.active[0]:
            raise Failed(f"admit says that there is no work for a floor of {floor}; {request}")
        logits = random_logits(rng, 1, run.subject.device.type, form)
        fault = floor_fault(logits[0], world.apply([Entry(0)], logits)[0], run["temperature"], floor)
        if fault is not None:
            raise Failed(f"{form} logits at temperature {run['temperature']}, floor {floor:.6g}: {fault}; {request}")
        world.release(0)


@check(Kind.LOGITS_PROCESSOR, "logits_processor.floors.none", Level.NUMERICS, needs=NEEDS)
def floors_none(run: Run) -> None:
    """A request that sets nothing has no floor, nor has one that other requests before it had."""
    world, nothing = World(run.subject), SamplingParams().as_mapping()
    for settings in ({}, *examples(run.subject)):
        floor_of(world, parameters(settings))
        floor = floor_of(world, nothing)
        if floor != -torch.inf:
            raise Failed(f"floor returned {floor} for a request that sets no parameter, wanted minus infinity")
