"""Parameters: accepted ones, refused ones, and the effect of accepted ones."""

from __future__ import annotations

from copy import deepcopy

from slotline.core import SamplingParams
from slotline.registry.descriptor import Kind
from slotline.registry.errors import RequestError
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.logits_processor import (
    Entry,
    World,
    by_example,
    examples,
    parameters,
    random_logits,
    random_request,
)


@check(Kind.LOGITS_PROCESSOR, "logits_processor.params.accepted", Level.NUMERICS, cases=by_example)
def params_accepted(run: Run) -> None:
    """Each example is accepted, also with parameters of other processors, and so is a request that sets nothing."""
    world, settings = World(run.subject), examples(run.subject)[run["example"]]
    for what, params in (
        ("defaults", SamplingParams().as_mapping()),
        ("the example", parameters(settings)),
        ("the example and another processor's parameter", {**parameters(settings), "someone_elses": object()}),
    ):
        try:
            world.processor.validate(params)
            answer = world.processor.admit(1, params, [3, 1, 4])
        except RequestError as error:
            raise Failed(f"{what} refused: {error}; example {dict(settings)}") from error
        if not isinstance(answer, bool):
            raise Failed(f"{what}: admit returned {answer!r}, wanted True or False")
        if answer:
            world.processor.release(1)


@check(Kind.LOGITS_PROCESSOR, "logits_processor.params.refused", Level.NUMERICS)
def params_refused(run: Run) -> None:
    """Each bad example is refused with a RequestError that names the parameter."""
    if not run.subject.capabilities.bad_examples:
        raise NotApplicable("not declared: bad_examples, settings that are refused")
    world = World(run.subject)
    for settings in run.subject.capabilities.bad_examples:
        try:
            world.processor.validate(parameters(settings))
        except RequestError as error:
            if not any(name in str(error) for name in settings):
                raise Failed(f"{dict(settings)} is refused without naming the parameter: {error}") from error
        else:
            raise Failed(f"validate accepts {dict(settings)}, one of bad_examples")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.params.effect", Level.NUMERICS, cases=by_example)
def params_effect(run: Run) -> None:
    """Each example gives the processor work and changes logits of some request."""
    settings, rng = examples(run.subject)[run["example"]], run.rng
    for number in range(20):
        world = World(run.subject)
        world.admit(0, random_request(rng, settings, length=1 + 2 * number))
        if run.subject.capabilities.parameters and not world.active[0]:
            raise Failed(f"admit says that there is no work for {dict(settings)}, one of examples")
        logits = random_logits(rng, 1, run.subject.device.type)
        if not bool((world.apply([Entry(0)], logits) == logits).all()):
            return
    raise Failed(f"{dict(settings)}, one of examples, changed no logit of 20 requests of 1 to 39 tokens")


@check(Kind.LOGITS_PROCESSOR, "logits_processor.params.unchanged", Level.HOSTILE, cases=by_example)
def params_unchanged(run: Run) -> None:
    """The parameters and the prompt that validate and admit get stay as they are, and admit keeps no hold on them."""
    settings, rng = examples(run.subject)[run["example"]], run.rng
    request = random_request(rng, settings, length=12)
    logits = random_logits(rng, 1, run.subject.device.type)
    worlds = World(run.subject), World(run.subject)
    params, prompt = parameters(settings), list(request.prompt)
    before = deepcopy(params), list(prompt)
    for world in worlds:
        world.take(0, request, params, prompt)
        if (params, prompt) != before:
            raise Failed(f"validate or admit changed what it was given: {before[0]} became {params}; prompt {prompt}")
    prompt[:] = [31] * len(prompt)
    params.clear()
    expected = World(run.subject)
    expected.admit(0, request)
    if not bool((worlds[0].apply([Entry(0)], logits) == expected.apply([Entry(0)], logits)).all()):
        raise Failed(
            f"logits changed because the mapping or the list that admit got was used for something else: {request}"
        )
