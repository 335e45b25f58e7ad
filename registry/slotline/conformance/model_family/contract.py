"""L0 of model families: descriptor, capabilities, factory, methods, claims, examples, refusals."""

from __future__ import annotations

import json

from attrs import define, evolve, fields

from slotline.registry.built import MODEL, misfits_of, refused_call
from slotline.registry.contracts.family_example import FamilyExample
from slotline.registry.contracts.model_family import ModelContext, ModelFacts, ModelFamilyCapabilities
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.model_family import FamilyWorld, by_example, examples_of
from slotline.testing.refusal_checks import UNKNOWN, beyond, register_part_refusals

TASKS = ("generate", "embed", "classify", "token_classify", "transcription")

register_contract_checks(
    KindContract(kind=Kind.MODEL_FAMILY, capabilities=ModelFamilyCapabilities, context=lambda _: None)
)
register_part_refusals(
    Kind.MODEL_FAMILY,
    {
        "architectures": lambda _: (UNKNOWN, ""),
        "devices": lambda _: ("cpu", "cuda", UNKNOWN),
        "tasks": lambda _: (*TASKS, UNKNOWN),
        "load_formats": lambda _: ("hf", "sharded", "dummy", UNKNOWN),
        "tensor": lambda subject: beyond(subject, "tensor"),
        "pipeline": lambda _: (True,),
        "taps": lambda _: (True,),
        "adapters": lambda _: (True,),
        "quantized": lambda _: (True,),
        "batch_invariant": lambda _: (True,),
        "fast_prefill": lambda _: (True,),
        "prompt_embeds": lambda _: (True,),
    },
)


@check(Kind.MODEL_FAMILY, "model_family.contract.claims", Level.CONTRACT, cost=0.01)
def claims_are_named(run: Run) -> None:
    """The architectures are named one by one, and a family that takes on others says which."""
    offer = run.subject.capabilities
    if not offer.architectures.values:
        raise Failed("architectures takes anything: the family would be offered every checkpoint. Name what it loads")
    if not offer.by_inspection.support:
        return
    family = run.subject.build(None)
    if not callable(getattr(family, "takes_on", None)):
        raise Failed("by_inspection is declared, and the family has no takes_on(architecture)")
    if family.takes_on(UNKNOWN) is not False:
        raise Failed(f"takes_on({UNKNOWN!r}) is not False, and no family can know that architecture")


@check(Kind.MODEL_FAMILY, "model_family.contract.examples", Level.CONTRACT, cases=by_example, cost=0.1)
def examples_fit_what_is_declared(run: Run) -> None:
    """Each example writes a folder whose architecture and task are declared, and is the same for the same seed."""
    offer, example = run.subject.capabilities, examples_of(run.subject)[run["example"]]
    if not isinstance(example, FamilyExample):
        raise Failed(f"the example is {type(example).__name__}, expected FamilyExample")
    if offer.tasks.refusal(example.task) is not None:
        raise Failed(f"the example's task is {example.task!r}, which is not declared")
    world = FamilyWorld(run)
    config = json.loads((world.folder() / "config.json").read_text(encoding="utf-8"))
    names = config.get("architectures") or [""]
    inspected = world.family.takes_on if offer.by_inspection.support else lambda _: False
    if not any(offer.architectures.refusal(name) is None or inspected(name) for name in names):
        raise Failed(f"the example is a {' / '.join(names)}, which is not declared")
    facts, other = world.inspect(), world.inspect(world.folder(1))
    if evolve(other, path=facts.path, kv_scales=facts.kv_scales) != facts:
        raise Failed("inspect finds other facts for another seed: the seed must change nothing but weights")
    if example.task not in facts.tasks:
        raise Failed(f"the facts of the example have the tasks {facts.tasks}, and its task is {example.task!r}")


@check(Kind.MODEL_FAMILY, "model_family.contract.model", Level.CONTRACT, cases=by_example, cost=0.3)
def model_fits(run: Run) -> None:
    """A loaded model has the methods and attributes that the core uses, and its facts are those of its context."""
    world, offer = FamilyWorld(run), run.subject.capabilities
    context = world.context()
    model = world.family.load(context)
    for text in misfits_of(MODEL, context, model):
        raise Failed(text)
    facts = context.facts
    needed = {
        "compute_logits": context.task == "generate",
        "embed": _reads_embeds(facts, offer),
        "process": bool(facts.modalities),
        "encode": bool(facts.modalities),
        "example": bool(facts.modalities),
        "axis_positions": facts.position_axes > 1,
        "adapt": bool(offer.adapters.support),
        "add_to_weight": bool(offer.adapters.support),
    }
    for name, asked in needed.items():
        if asked and not callable(getattr(model, name, None)):
            raise Failed(f"the model has no method {name!r}, which what is declared asks for")
    if refusal := refused_call(model.forward, "forward", *_forward_arguments(facts, offer)):
        raise Failed(refusal)
    if model.facts != context.facts:
        raise Failed("the model's facts are not those of its context")
    if not isinstance(model.notes, tuple) or not all(isinstance(note, str) for note in model.notes):
        raise Failed(f"notes are {model.notes!r}, expected a tuple of texts")
    if context.task != "generate" and getattr(model, "pooler", None) is None:
        raise Failed(f"the task is {context.task!r}, and the model has no pooler")


@check(Kind.MODEL_FAMILY, "model_family.contract.later_context", Level.CONTRACT, cases=by_example, cost=0.3)
def load_takes_a_later_context(run: Run) -> None:
    """`load` accepts a context of a later version, with an unknown field."""
    world = FamilyWorld(run)
    context = world.context()

    class Later(ModelContext):
        slotline_unknown_name: str = "of a later version"

    later = define(Later, frozen=True, kw_only=True, slots=False)
    later.__name__ = "ModelContext"
    values = {item.name: getattr(context, item.name) for item in fields(ModelContext)}
    if world.family.load(later(**values)) is None:
        raise Failed("load returned None")


@check(Kind.MODEL_FAMILY, "model_family.contract.capture", Level.CONTRACT, cases=by_example, cost=0.1)
def capture_is_answered(run: Run) -> None:
    """`capture_refusal` is None or one sentence, for every device and dtype."""
    world = FamilyWorld(run)
    answer = getattr(world.family, "capture_refusal", None)
    if answer is None:
        raise NotApplicable("it has no capture_refusal, so nothing is captured")
    facts = world.inspect()
    for device in ("cpu", "cuda:0", UNKNOWN):
        for dtype in ("float32", "bfloat16", "float16"):
            found = answer(facts, device, dtype)
            if found is not None and (not isinstance(found, str) or not found.strip() or "\n" in found):
                raise Failed(f"capture_refusal for {device} in {dtype} is {found!r}, expected None or one sentence")


def _reads_embeds(facts: ModelFacts, offer: ModelFamilyCapabilities) -> bool:
    """True if steps may give embeddings in place of tokens."""
    whole = facts.parts is None or facts.parts.chained
    return any(not (m.cross or m.raw) for m in facts.modalities) or (bool(offer.prompt_embeds.support) and whole)


def _forward_arguments(facts: ModelFacts, offer: ModelFamilyCapabilities) -> tuple[list[object], dict[str, object]]:
    """Return arguments with which the core may call `forward`: those by place, and those by name."""
    named = {
        "advance": bool(facts.state_layers),
        "tap": bool(offer.taps.support),
        "fast_prefill": bool(offer.fast_prefill.support),
        "token_types": facts.token_types > 1 and bool(offer.token_types.support),
        "encoder_states": any(m.cross for m in facts.modalities),
        "position_offsets": facts.position_axes > 1,
        "layer_embeds": facts.layer_embeds > 0,
        "raw_inputs": any(m.raw for m in facts.modalities),
    }
    places = 5 if _reads_embeds(facts, offer) else 4
    return [object() for _ in range(places)], {name: object() for name, given in named.items() if given}
