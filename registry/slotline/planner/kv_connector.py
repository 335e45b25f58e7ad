"""Choice of the KV connector: checks that the configured plugin can be used."""

from __future__ import annotations

from typing import Any

from slotline.planner.component_selection import device_need, texts_of
from slotline.planner.offers import narrowed
from slotline.registry.config import LoadedConfig
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Need, Plan, part_reasons

_FIX = "change what the reasons name, take another connector, or remove [kv_connector]"


def choose_connector(loaded: LoadedConfig, registry: PluginRegistry, info: DeviceInfo) -> Descriptor[Any] | None:
    """Return the KV connector that the configuration names, if any, with the capabilities that its probe left.

    Raises:
        NegotiationError: with every reason why it cannot be used on this device.
    """
    name = loaded.config.kv_connector.name
    if not name:
        return None
    descriptor = registry.load(Kind.KV_CONNECTOR, name, required=True)
    descriptor = narrowed(descriptor, info, f"kv_connector {name!r}", _FIX)
    if texts := texts_of(part_reasons(descriptor.capabilities, (device_need(info),))):
        raise _refusal(name, texts)
    return descriptor


def refuse_connector(loaded: LoadedConfig, descriptor: Descriptor[Any] | None, plan: Plan) -> None:
    """Refuse a connector that cannot hold the negotiated caches, or that would have nothing to hold.

    Raises:
        NegotiationError: with every reason.
    """
    if descriptor is None:
        return
    needs, texts = dict[str, Need](), list[str]()
    for group in plan.cache_groups:
        for layer in group.layers:
            origin = f"model: {group.name} layers"
            needs[layer.kv_kind] = Need(capability="kv_kinds", value=layer.kv_kind, origin=origin)
    texts += texts_of(part_reasons(descriptor.capabilities, tuple(needs.values())))
    if plan.state_groups:
        kinds = ", ".join(dict.fromkeys(layer.state_kind for group in plan.state_groups for layer in group.layers))
        texts.append(
            f"the model keeps states ({kinds}): they are no blocks, and one that was kept behind a block whose load "
            "failed could not be told from a good one"
        )
    elif not plan.cache_groups:
        texts.append("the model has no cache")
    if not plan.prefix_caching and not plan.state_groups:
        origin = next((s.origin for s in plan.settings if s.key == "cache.prefix_caching"), "")
        texts.append(f"cache.prefix_caching is false ({origin}): what it holds comes back as cached prefixes")
    if texts:
        raise _refusal(descriptor.name, texts)


def _refusal(name: str, texts: list[str]) -> NegotiationError:
    return NegotiationError(f"kv_connector {name!r} cannot be used: {'; '.join(texts)}", fix=_FIX)
