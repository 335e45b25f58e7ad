"""Checks of built plugins: the methods of their contract, and the number of their arguments.

The engine checks each object when its factory has made it. The conformance suite makes the same check with more ways of
calling. Nothing here runs during steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

from slotline.registry import contracts
from slotline.registry.contracts.extension import FEATURE_METHODS, METHODS, SPEC_METHODS
from slotline.registry.contracts.lora import ExtendedLora, SingleLora
from slotline.registry.descriptor import Descriptor, Kind

Asked = Callable[[Any], bool]
"""Whether capabilities ask for a method."""


def _always(_capabilities: Any) -> bool:
    return True


def _never(_capabilities: Any) -> bool:
    return False


def _declared(name: str) -> Asked:
    """Return a function that tells if a flag (or a plain bool) is declared."""

    def asked(capabilities: Any) -> bool:
        offer = getattr(capabilities, name)
        return offer if isinstance(offer, bool) else bool(offer.support)

    return asked


def _other_formats(capabilities: Any) -> bool:
    """Return True if a cache spec declares a format other than ``plain``."""
    values = capabilities.formats.values
    return values is None or any(name != contracts.PLAIN for name in values)


@frozen(kw_only=True)
class BuiltContract:
    """Protocol of a kind's built objects.

    Attributes:
        protocol: its methods are required, except as `optional` says.
        optional: by method, a function of the capabilities that returns True if the method is required.
        further: protocols whose own methods are required by some capabilities.
        attributes: attributes that are required by some capabilities.
    """

    protocol: type
    optional: Mapping[str, Asked] = field(default=MappingProxyType({}))
    further: tuple[tuple[type, Asked], ...] = ()
    attributes: Mapping[str, Asked] = field(default=MappingProxyType({}))


BUILT: Mapping[Kind, BuiltContract] = MappingProxyType(
    {
        Kind.ATTENTION: BuiltContract(
            protocol=contracts.AttentionBackend,
            optional={"write": lambda capabilities: not capabilities.writes_cache},
            further=(
                (contracts.CascadeBackend, _declared("cascade")),
                (contracts.BlockListener, _declared("block_events")),
            ),
        ),
        Kind.STATE: BuiltContract(
            protocol=contracts.StateBackend,
            optional={"commit": _declared("rollback"), "copy": _declared("checkpoints")},
        ),
        Kind.KV_SPEC: BuiltContract(
            protocol=contracts.KVSpec,
            further=((contracts.TensorSpec, _other_formats),),
        ),
        Kind.KV_CONNECTOR: BuiltContract(
            protocol=contracts.KVConnector,
            further=(
                (contracts.AsyncKVConnector, _declared("asynchronous")),
                (contracts.RequestKVConnector, _declared("by_request")),
                (contracts.CountingKVConnector, _declared("counts")),
            ),
        ),
        Kind.DRAFTER: BuiltContract(
            protocol=contracts.Drafter,
            further=((contracts.Observer, _declared("needs_computed")),),
            attributes={"layer_ids": _declared("needs_layers")},
        ),
        Kind.LOGITS_PROCESSOR: BuiltContract(
            protocol=contracts.LogitsProcessor,
            optional={"floor": _declared("floors"), "companion": _declared("companions")},
        ),
        Kind.LORA: BuiltContract(
            protocol=contracts.Lora,
            further=(
                (contracts.MergedLora, _declared("merged")),
                (ExtendedLora, _declared("extended")),
                (SingleLora, _declared("single")),
            ),
        ),
        Kind.MODEL_FAMILY: BuiltContract(
            protocol=contracts.ModelFamily,
            optional={"capture_refusal": _never},  # a family without it is never captured
        ),
        Kind.STRUCTURED_OUTPUT: BuiltContract(
            protocol=contracts.StructuredOutput, optional={"token_text": _declared("reusable_masks")}
        ),
        Kind.RESPONSE_PARSER: BuiltContract(protocol=contracts.ResponseParser),
        Kind.DEVICE: BuiltContract(
            protocol=contracts.Device,
            optional={"graph_capture": _declared("graphs"), "compiler": _never, "time_point": _never},
            attributes={"name": _always, "torch_device": _always, "ops": _always},
        ),
        Kind.EXTENSION: BuiltContract(
            protocol=contracts.StepExtension,
            further=((contracts.FeatureExtension, _always),),
            optional=dict.fromkeys((*METHODS, *FEATURE_METHODS, *SPEC_METHODS), _never),  # any of them
        ),
        Kind.LINEAR: BuiltContract(protocol=contracts.Linear),
        Kind.EXPERTS: BuiltContract(protocol=contracts.Experts),
        Kind.WEIGHT_FORMAT: BuiltContract(
            protocol=contracts.WeightFormat,
            further=((contracts.OnlineFormat, _declared("online")),),
        ),
        Kind.COMMUNICATOR: BuiltContract(
            protocol=contracts.Communicator,
            attributes={"rank": _always, "size": _always},
        ),
        Kind.EXPERT_PLACEMENT: BuiltContract(protocol=contracts.ExpertPlacement),
        Kind.SCHEDULER_POLICY: BuiltContract(
            protocol=contracts.SchedulerPolicy,
            optional={
                "admitted": _declared("accounts"),
                "left": _declared("accounts"),
                "validate": _declared("validates"),
                "admits": _declared("admits"),
                "budget": _declared("budgets"),
                "victim": _declared("victims"),
            },
        ),
    }
)
"""By kind; the objects that factories make."""

DEVICE_OPS = BuiltContract(protocol=contracts.DeviceOps)
"""The table of operations of a device."""

STATE_SPEC = BuiltContract(
    protocol=contracts.StateSpec,
    attributes={"interval": _always, "alignment": _always},
)
"""What the factories of cache specs of states make."""

MODEL = BuiltContract(
    protocol=contracts.Model,
    optional={
        "compute_logits": lambda context: context.task == "generate",
        "embed": _never,
        "reload_weights": _never,
    },
    attributes={"notes": _always},
)
"""What `ModelFamily.load` makes; its context stands for the capabilities."""

GRAMMAR_STATE = BuiltContract(protocol=contracts.GrammarState, attributes={"finished": _always})
"""What `StructuredOutput.start` makes."""


def misfits(descriptor: Descriptor[Any], built: Any) -> Iterator[str]:
    """Yield a sentence for each method of a built object that is missing, or cannot be called as the core calls it."""
    yield from misfits_of(built_contract(descriptor.kind, descriptor.capabilities), descriptor.capabilities, built)


def built_contract(kind: Kind, capabilities: Any) -> BuiltContract:
    """Return the contract of the built objects of a plugin with these capabilities."""
    if kind is Kind.KV_SPEC and capabilities.state.support:
        return STATE_SPEC
    return BUILT[kind]


def misfits_of(contract: BuiltContract, capabilities: Any, built: Any, *, strict: bool = False) -> Iterator[str]:
    """Yield a sentence for each misfit of a built object with any contract.

    Args:
        contract: the contract of the object's kind.
        capabilities: the capabilities that the plugin declares.
        built: the object.
        strict: True to require the methods of `further` protocols, and to require that arguments with a default can be
            passed by name and can be left out. False accepts objects that work for plans without these.
    """
    if built is None:
        yield "it is None instead of a built object"
        return
    protocols = [contract.protocol, *(protocol for protocol, asked in contract.further if asked(capabilities))]
    for protocol in protocols:
        for name, wanted in methods_of(protocol):
            found = getattr(built, name, None)
            asked = strict or protocol is contract.protocol
            asked = asked and contract.optional.get(name, _always)(capabilities)
            if found is None and not asked:
                continue
            if not callable(found):
                yield f"{_called(built)} has no method {name!r}, which the contract asks for"
            else:
                yield from _uncallable(found, name, wanted, strict=strict)
    for name, asks in contract.attributes.items():
        if asks(capabilities) and not hasattr(built, name):
            yield f"{_called(built)} has no attribute {name!r}, which its capabilities ask for"


def methods_of(protocol: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods that a protocol itself defines."""
    return ((name, item) for name, item in vars(protocol).items() if not name.startswith("_") and callable(item))


def refused_call(
    function: Callable[..., Any], name: str, positional: list[Any], named: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """Return the reason why a function cannot be called with these arguments, or None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have no signature
        return None
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        also = f" and {', '.join(f'{key}=' for key in named)}" if named else ""
        count = f"{len(positional)} argument{'' if len(positional) == 1 else 's'}"
        return f"{name}{_plain(signature)} cannot be called with {count}{also}: {error}"
    return None


def _plain(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature without annotations."""
    parameters = [item.replace(annotation=item.empty) for item in signature.parameters.values()]
    return inspect.Signature(parameters)


def _uncallable(found: Callable[..., Any], name: str, wanted: Callable[..., Any], *, strict: bool) -> Iterator[str]:
    """Yield at most one sentence, the reason why a method cannot be called like the protocol's method."""
    parameters = list(inspect.signature(wanted).parameters.values())[1:]
    places = [item for item in parameters if item.kind is not item.KEYWORD_ONLY]
    by_keyword = [item for item in parameters if item.kind is item.KEYWORD_ONLY]
    named = {item.name: object() for item in by_keyword if item.default is item.empty}
    calls: list[tuple[list[Any], dict[str, Any]]] = [([object() for _ in places], named)]
    if strict:
        needed = [object() for item in places if item.default is item.empty]
        by_name = {item.name: object() for item in parameters if item.default is not item.empty}
        calls = [(needed, named), (needed, {**named, **by_name}), *calls]
    for positional, keywords in calls:
        if refusal := refused_call(found, name, positional, keywords):
            yield refusal
            return


def _called(built: Any) -> str:
    return f"the class {built.__name__}" if isinstance(built, type) else type(built).__name__
