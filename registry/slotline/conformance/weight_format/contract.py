"""L0 of weight formats: descriptor, capabilities, factory, methods, claims, examples."""

from __future__ import annotations

from slotline.registry.contracts import ELEMENTS, WeightFormatCapabilities, WeightFormatContext
from slotline.registry.contracts.weight_format import FormatExample
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.weight_format import MemoryReader, context_of, examples_of
from slotline.testing.refusal_checks import UNKNOWN, register_part_refusals


def _context(run: Run) -> WeightFormatContext:
    try:
        example = next(iter(examples_of(run.subject).values()))
    except NotApplicable:
        example = None
    return context_of(run.subject, example, MemoryReader({}))


register_contract_checks(KindContract(kind=Kind.WEIGHT_FORMAT, capabilities=WeightFormatCapabilities, context=_context))
register_part_refusals(
    Kind.WEIGHT_FORMAT,
    {"methods": lambda _: (UNKNOWN, ""), "schemes": lambda _: (*ELEMENTS, UNKNOWN)},
)


@check(Kind.WEIGHT_FORMAT, "weight_format.contract.examples", Level.CONTRACT, needs={"online": False}, cost=0.01)
def examples_cover_what_is_declared(run: Run) -> None:
    """A format that reads checkpoints has an example of every scheme that it declares, and of no other."""
    offer = run.subject.capabilities
    if offer.online.support:
        raise NotApplicable("it reads no checkpoints")
    try:
        examples = examples_of(run.subject)
    except NotApplicable as error:
        raise Failed(f"{error}: give the factory a static method that returns FormatExample objects") from error
    for name, example in examples.items():
        if not isinstance(example, FormatExample):
            raise Failed(f"the example {name!r} is {type(example).__name__}, expected FormatExample")
        if offer.schemes.refusal(example.scheme.name) is not None:
            raise Failed(f"the example {name!r} is of the scheme {example.scheme.name}, which is not declared")
    found = {example.scheme.name for example in examples.values()}
    if missing := [name for name in ELEMENTS if offer.schemes.refusal(name) is None and name not in found]:
        raise Failed(f"no example is of {', '.join(missing)}, which is declared")


@check(Kind.WEIGHT_FORMAT, "weight_format.contract.claims", Level.CONTRACT, cost=0.01)
def claims_are_named(run: Run) -> None:
    """The `quant_method` values that it reads are named one by one, and each example has one of them."""
    offer = run.subject.capabilities
    if not offer.methods.values:
        raise Failed("methods takes anything: it would be offered every checkpoint. Name what it reads")
    if offer.online.support:
        return
    for name, example in examples_of(run.subject).items():
        method = context_of(run.subject, example, MemoryReader({})).method
        if offer.methods.refusal(method) is not None:
            raise Failed(f"the example {name!r} has the quant_method {method!r}, which is not declared")
