"""Companions: second prompts computed along with requests."""

from __future__ import annotations

from slotline.core import SamplingParams
from slotline.registry.contracts import Companion
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.logits_processor import VOCAB_SIZE, World, examples, parameters, random_request
from slotline.testing.oracles.logits_processor import companion_fault

NEEDS = {"companions": True}


@check(Kind.LOGITS_PROCESSOR, "logits_processor.companions.prompt", Level.NUMERICS, needs=NEEDS)
def companions_prompt(run: Run) -> None:
    """Examples have companions with a prompt, the same in every call, and `admit` has work for only those requests."""
    world, rng, found = World(run.subject), run.rng, list[Companion]()
    for settings in ({}, *examples(run.subject)):
        request = random_request(rng, settings)
        params, prompt = parameters(settings), list(request.prompt)
        companion = world.processor.companion(params, prompt)
        if companion is not None:
            fault = companion_fault(companion, VOCAB_SIZE)
            if fault is not None:
                raise Failed(f"{fault}; {request}")
            found.append(companion)
        again = world.processor.companion(params, prompt)
        if again != companion:
            raise Failed(f"companion returned {companion} and then {again} for the same request; {request}")
        if (params, prompt) != (parameters(settings), list(request.prompt)):
            raise Failed(f"companion changed the parameters or the prompt that it was given; {request}")
        works = world.processor.admit(0, params, prompt)
        if works != (companion is not None):
            raise Failed(f"admit returned {works}, and companion {companion}; {request}")
        if works:
            world.processor.release(0)
    if not found:
        raise Failed("no example has a companion, though companions are declared")
    if world.processor.companion(SamplingParams().as_mapping(), [3, 1, 4]) is not None:
        raise Failed("a request that sets no parameter has a companion: every request would take a second row")
