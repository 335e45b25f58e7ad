"""Choose step extensions and refuse those whose requirements a plan does not meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from slotline.planner.component_selection import device_need, texts_of
from slotline.planner.offers import narrowed
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts.extension import CARRIED, FEATURES
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Setting, part_reasons

_FIX = "change what the reasons name, or remove its table under [extensions]"
_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "adapters": "lora.name",
        "async_scheduling": "scheduler.async",
        "chunked_prefill": "scheduler.chunked_prefill",
        "drafts": "drafter.name",
        "graphs": "graphs.mode",
        "pipeline": "parallel.pipeline",
        "pooling": "task",
        "prefix_caching": "cache.prefix_caching",
        "states": "model",
    }
)
"""Configuration key that decides each feature."""


def choose_extensions(loaded: LoadedConfig, registry: PluginRegistry, info: DeviceInfo) -> tuple[Descriptor[Any], ...]:
    """Return the extensions that the configuration names, in their order, with what their probes left of the offers.

    Raises:
        NegotiationError: if one cannot run on this device, with every reason.
    """
    chosen = []
    for name in loaded.config.extensions:
        descriptor = registry.load(Kind.EXTENSION, name, required=True)
        descriptor = narrowed(descriptor, info, f"extension {name!r}", _FIX)
        if texts := texts_of(part_reasons(descriptor.capabilities, (device_need(info),))):
            raise NegotiationError(f"extension {name!r} cannot be used: {'; '.join(texts)}", fix=_FIX)
        chosen.append(descriptor)
    return tuple(sorted(chosen, key=lambda d: (d.capabilities.order, d.name)))


def carriers(registry: PluginRegistry, features: Mapping[str, bool]) -> tuple[Descriptor[Any], ...]:
    """Return the extensions that carry features of a plan: each has the name of its feature.

    Args:
        features: by name, True if the plan has it.

    Raises:
        PluginNotFoundError: if none is installed for a feature of the plan.
    """
    return tuple(registry.load(Kind.EXTENSION, name, required=True) for name in CARRIED if features[name])


def refuse_extensions(
    registry: PluginRegistry, extensions: Sequence[Descriptor[Any]], features: Mapping[str, bool]
) -> frozenset[str]:
    """Check every extension's requirements against a plan.

    Args:
        features: by name out of `FEATURES`, True if the plan has it.

    Returns:
        The names of all features of the plan, those that extensions provide included.

    Raises:
        NegotiationError: with every requirement that is not met, and the part that is against it.
    """
    sources = {name: f"{_KEYS[name]} decides it" for name in FEATURES}
    found = {name for name in FEATURES if features[name]}
    for descriptor in extensions:
        for name in descriptor.capabilities.provides:
            sources[name] = f"extension {descriptor.name!r} of {registry.source(descriptor)} provides it"
            found.add(name)
    texts = [text for one in extensions for text in _misfits(registry, one, found, sources)]
    if texts:
        raise NegotiationError(f"extensions cannot be used: {'; '.join(texts)}", fix=_FIX)
    return frozenset(found)


def extension_settings(extensions: Sequence[Descriptor[Any]]) -> tuple[Setting, ...]:
    """Return a line of the plan for each extension: its order, and what it requires and excludes."""
    return tuple(
        Setting(
            key=f"extensions.{one.name}",
            asked="named",
            resolved=_described(one.capabilities),
            origin=f"[extensions.{one.name}]",
            explicit=True,
        )
        for one in extensions
    )


def _described(offer: Any) -> str:
    said = [f"order {offer.order}"]
    for what in ("provides", "requires", "excludes"):
        if names := getattr(offer, what):
            said.append(f"{what} {', '.join(names)}")
    return "; ".join(said)


def _misfits(
    registry: PluginRegistry, descriptor: Descriptor[Any], found: set[str], sources: Mapping[str, str]
) -> list[str]:
    """Return a sentence for each requirement of an extension that the plan does not meet."""
    who, offer = f"{descriptor.name!r} of {registry.source(descriptor)}", descriptor.capabilities
    texts = [
        f"{who} requires {name!r}, which this plan does not have "
        f"({sources.get(name, 'no extension of this plan provides it')})"
        for name in offer.requires
        if name not in found
    ]
    own = set(offer.provides)
    return texts + [
        f"{who} excludes {name!r}, which this plan has ({sources[name]})"
        for name in offer.excludes
        if name in found - own
    ]
