"""Loading of descriptors, factories and options classes from dotted paths, with checks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import attrs

from slotline.registry.descriptor import HOST_CONTRACTS, Descriptor, Kind
from slotline.registry.errors import ContractError, PluginError, PluginLoadError, SlotlineError

_CAPABILITIES: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.ATTENTION: "AttentionCapabilities",
        Kind.STATE: "StateCapabilities",
        Kind.KV_SPEC: "KVSpecCapabilities",
        Kind.KV_CONNECTOR: "KVConnectorCapabilities",
        Kind.DRAFTER: "DrafterCapabilities",
        Kind.LOGITS_PROCESSOR: "LogitsProcessorCapabilities",
        Kind.LORA: "LoraCapabilities",
        Kind.MODEL_FAMILY: "ModelFamilyCapabilities",
        Kind.STRUCTURED_OUTPUT: "StructuredOutputCapabilities",
        Kind.RESPONSE_PARSER: "ResponseParserCapabilities",
        Kind.DEVICE: "DeviceCapabilities",
        Kind.EXTENSION: "ExtensionCapabilities",
        Kind.LINEAR: "LinearCapabilities",
        Kind.EXPERTS: "ExpertsCapabilities",
        Kind.WEIGHT_FORMAT: "WeightFormatCapabilities",
        Kind.COMMUNICATOR: "CommunicatorCapabilities",
        Kind.EXPERT_PLACEMENT: "ExpertPlacementCapabilities",
        Kind.SCHEDULER_POLICY: "SchedulerPolicyCapabilities",
    }
)


_REMEDIES: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.ATTENTION: "name another in attention.backend",
        Kind.STATE: "name another in state.backend",
        Kind.KV_SPEC: "name another in [cache.kv_spec]",
        Kind.KV_CONNECTOR: "name another in kv_connector.name, or remove [kv_connector]",
        Kind.DRAFTER: "name another in drafter.name, or remove [drafter]",
        Kind.LOGITS_PROCESSOR: "correct its table in the configuration, or do without it",
        Kind.LORA: "name another in lora.name, or remove [lora]",
        Kind.MODEL_FAMILY: "name it under [plugins] block, if another serves the model",
        Kind.STRUCTURED_OUTPUT: "name another in structured_output.backend",
        Kind.RESPONSE_PARSER: "name another in response_parser.name",
        Kind.DEVICE: "name another in device",
        Kind.EXTENSION: "correct its table in the configuration, or do without it",
        Kind.LINEAR: "name another in weights.linear",
        Kind.EXPERTS: "name another in weights.experts",
        Kind.WEIGHT_FORMAT: "name it under [plugins] block, if another reads the checkpoint",
        Kind.COMMUNICATOR: "name another in parallel.communicator",
        Kind.EXPERT_PLACEMENT: "name another in parallel.expert_placement",
        Kind.SCHEDULER_POLICY: "name another in scheduler.policy",
    }
)
"""What to do about a plugin that cannot be built."""


def remedy_for(kind: Kind) -> str:
    """Return advice for the failure of a plugin of a kind."""
    return _REMEDIES[kind]


def label_of(descriptor: Descriptor[Any]) -> str:
    """Return ``kind:name``."""
    return f"{descriptor.kind.value}:{descriptor.name}"


def import_dotted(target: str, what: str, *, module: bool = False) -> Any:
    """Return the object at ``package.module:attribute``.

    Args:
        target: the dotted path. The attribute may contain dots.
        what: the requester, for the message.
        module: True to accept the path of a module, without an attribute.

    Raises:
        PluginLoadError: with the cause chained.
    """
    module_name, colon, attribute = target.partition(":")
    if not module_name.strip() or not (attribute.strip() or (module and not colon)):
        raise PluginLoadError(f"{what}: {target!r} is not a path of the form 'package.module:attribute'")
    try:
        found: Any = importlib.import_module(module_name.strip())
        for part in filter(None, attribute.split("[")[0].strip().split(".")):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # importing a plugin may raise anything
        raise PluginLoadError(f"{what}: cannot load {target!r}: {one_line(error)}", fix=load_fix(error)) from error
    return found


@contextmanager
def typed_failures(what: str, fix: str) -> Iterator[None]:
    """Turn exceptions of a plugin's code inside into a `PluginError` that begins with `what`.

    Slotline's own errors pass unchanged.
    """
    try:
        yield
    except SlotlineError:
        raise
    except (Exception, SystemExit) as error:  # a plugin's code may raise anything
        raise PluginError(f"{what}: {one_line(error)}", fix=fix) from error


def building(descriptor: Descriptor[Any], source: str) -> AbstractContextManager[None]:
    """Turn exceptions of a plugin's factory inside into a `PluginError` with plugin, source and remedy."""
    return typed_failures(
        f"{label_of(descriptor)} of {source} cannot be built for this model",
        fix=f"{_REMEDIES[descriptor.kind]}; the cause is chained (--traceback shows it)",
    )


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    text = error.message if hasattr(error, "message") else str(error)
    first = str(text).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def load_fix(error: BaseException) -> str:
    """Return advice for a plugin whose import fails."""
    if isinstance(error, SlotlineError) and error.fix:
        return error.fix
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"install what provides the module {package!r}, or ask for another plugin"
    return "repair or update the plugin, or ask for another one; the cause is chained (--traceback shows it)"


def to_descriptor(target: Any, what: str) -> Descriptor[Any]:
    """Return the descriptor of the object that an entry point names.

    `target` may be a descriptor, a class with an attribute `descriptor`, or a callable without arguments that returns a
    descriptor. If the descriptor of a class has no factory, the class is the factory.

    Raises:
        PluginLoadError: if it is none of these, or the descriptor is incomplete.
    """
    found = target
    if isinstance(target, type):
        found = getattr(target, "descriptor", target)
        if isinstance(found, Descriptor) and not found.factory:
            found = attrs.evolve(found, factory=target)
    elif not isinstance(target, Descriptor) and callable(target):
        found = _called(target, what)
    if not isinstance(found, Descriptor):
        raise PluginLoadError(
            f"{what}: {target!r} is not a descriptor",
            fix="point it to a Descriptor, to a class with one as `descriptor`, or to a function that returns one",
        )
    _check(found, what)
    return found


def _called(target: Callable[[], Any], what: str) -> Any:
    try:
        return target()
    except (Exception, SystemExit) as error:
        raise PluginLoadError(f"{what}: calling {target!r} failed: {one_line(error)}", fix=load_fix(error)) from error


def capabilities_class(kind: Kind) -> type:
    """Return the class of a slot's capabilities."""
    from slotline.registry import contracts

    found: type = getattr(contracts, _CAPABILITIES[kind])
    return found


def _check(descriptor: Descriptor[Any], what: str) -> None:
    if not descriptor.factory:
        raise PluginLoadError(f"{what}: its descriptor names no factory", fix="set factory='package.module:attribute'")
    wanted = capabilities_class(descriptor.kind)
    if not isinstance(descriptor.capabilities, wanted):
        raise PluginLoadError(
            f"{what}: the capabilities of a {descriptor.kind.value} plugin must be {wanted.__name__}, "
            f"not {type(descriptor.capabilities).__name__}"
        )


def bind_contract(descriptor: Descriptor[Any]) -> int:
    """Return the highest contract version that host and plugin both support.

    Raises:
        ContractError: if there is none, naming the side that must be updated.
    """
    host = HOST_CONTRACTS[descriptor.kind]
    version = host.common(descriptor.contract)
    if version is not None:
        return version
    newer = descriptor.contract.lowest > host.highest
    raise ContractError(
        f"{label_of(descriptor)} speaks contract {descriptor.contract} of kind {descriptor.kind.value!r}, "
        f"this slotline speaks {host}",
        fix="upgrade slotline" if newer else f"upgrade the distribution that brings {descriptor.name!r}",
    )


def resolve_factory(descriptor: Descriptor[Any], source: str = "") -> Callable[..., Any]:
    """Return the plugin's factory, imported if the descriptor has a path.

    Args:
        descriptor: the plugin.
        source: the plugin's distribution or file, for the message.

    Raises:
        PluginLoadError: if it cannot be imported or called.
    """
    what = f"the factory of {label_of(descriptor)}{f' of {source}' if source else ''}"
    factory = descriptor.factory
    factory = import_dotted(factory, what) if isinstance(factory, str) else factory
    if not callable(factory):
        raise PluginLoadError(f"{what} is {factory!r}, which cannot be called")
    return factory  # type: ignore[no-any-return]


def resolve_options(descriptor: Descriptor[Any]) -> type | None:
    """Return the class of the plugin's own table, or None if it takes no options.

    Raises:
        PluginLoadError: if it cannot be imported or is not an attrs class.
    """
    what = f"the options class of {label_of(descriptor)}"
    options = descriptor.options
    options = import_dotted(options, what) if isinstance(options, str) else options
    if options is not None and not (isinstance(options, type) and attrs.has(options)):
        raise PluginLoadError(f"{what} is {options!r}, which is not an attrs class")
    return options
