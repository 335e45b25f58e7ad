"""Choice of the KV connector: checks that the configured plugin can be used."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from slotline.planner.component_selection import device_need, texts_of
from slotline.planner.offers import narrowed
from slotline.registry.capability import Flag
from slotline.registry.config import LoadedConfig
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Need, Plan, Setting, part_reasons
from slotline.registry.ranks import Place

KEY = "kv_connector.name"
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
    descriptor = _usable(narrowed(descriptor, info, f"kv_connector {name!r}", _FIX), info)
    for one in inner_connectors(loaded, registry, descriptor):
        _usable(narrowed(one, info, f"kv_connector {one.name!r} in {name!r}", _FIX), info)
    return descriptor


def inner_connectors(
    loaded: LoadedConfig, registry: PluginRegistry, descriptor: Descriptor[Any]
) -> tuple[Descriptor[Any], ...]:
    """Return the connectors that a connector is made of, in order. Empty for most.

    Raises:
        NegotiationError: if one of them is made of others, or is named twice.
        ConfigError: for wrong options.
    """
    if not descriptor.capabilities.composes:
        return ()
    names = tuple(getattr(registry.options(loaded, descriptor), descriptor.capabilities.composes))
    found = tuple(registry.load(Kind.KV_CONNECTOR, name, required=True) for name in names)
    texts = [f"{one.name!r} is itself made of others" for one in found if one.capabilities.composes]
    texts += [f"{name!r} is named twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if texts or not names:
        raise _refusal(descriptor.name, texts or [f"{descriptor.capabilities.composes} names no connector"])
    return found


def _usable(descriptor: Descriptor[Any], info: DeviceInfo) -> Descriptor[Any]:
    """Return a descriptor that works on a device.

    Raises:
        NegotiationError: if it does not.
    """
    if texts := texts_of(part_reasons(descriptor.capabilities, (device_need(info),))):
        raise _refusal(descriptor.name, texts)
    return descriptor


def refuse_connector(
    loaded: LoadedConfig, registry: PluginRegistry, descriptor: Descriptor[Any] | None, plan: Plan
) -> None:
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
    parts = (descriptor, *inner_connectors(loaded, registry, descriptor))
    wishes = {one.name: _by_layer(loaded, registry, one) for one in parts}
    for one in parts:
        texts += texts_of(part_reasons(one.capabilities, tuple(needs.values())))
    if plan.state_groups:
        kinds = ", ".join(dict.fromkeys(layer.state_kind for group in plan.state_groups for layer in group.layers))
        texts += [
            f"the model keeps states ({kinds}), and {one.name!r} does not declare that it takes states"
            for one in parts
            if not one.capabilities.states.support
        ]
        if descriptor.capabilities.layers.support and not descriptor.capabilities.asynchronous.support:
            texts.append(
                f"the model keeps states ({kinds}), and loads end layer by layer in the step that reads them: a state "
                "that was kept behind a block whose load failed could not be told from a good one"
            )
    elif not plan.cache_groups:
        texts.append("the model has no cache")
    if not plan.prefix_caching and not plan.state_groups:
        origin = next((s.origin for s in plan.settings if s.key == "cache.prefix_caching"), "")
        texts.append(f"cache.prefix_caching is false ({origin}): what it holds comes back as cached prefixes")
    if "must" in wishes.values():
        late = all(one.capabilities.late_layers.support for one in parts if wishes[one.name] == "must")
        texts += _against_layers(loaded, plan, late=late)
    pipeline = loaded.config.parallel.pipeline
    if waits_for_loads(descriptor, plan) and isinstance(pipeline, int) and pipeline > 1:
        texts.append(f"parallel.pipeline = {pipeline}: a request that waits for its blocks would have its turn")
    if texts:
        raise _refusal(descriptor.name, texts)


def waits_for_loads(descriptor: Descriptor[Any], plan: Plan) -> bool:
    """Return whether a request waits for its loads without tokens.

    With states it does for any connector: a step in which a load fails makes wrong states, and one of them may be kept
    before the failure is known.
    """
    return bool(descriptor.capabilities.asynchronous.support or plan.state_groups)


def loads_setting(descriptor: Descriptor[Any] | None, plan: Plan) -> tuple[Setting, ...]:
    """Return the record of requests that wait for a connector which loads in the step."""
    if descriptor is None or descriptor.capabilities.asynchronous.support or not waits_for_loads(descriptor, plan):
        return ()
    origin = f"the model keeps states, and a step that lacks what {descriptor.name!r} could not load makes wrong ones"
    return (Setting(key="kv_connector loads", asked="in the step", resolved="before the step", origin=origin),)


def settle_layer_calls(
    loaded: LoadedConfig, registry: PluginRegistry, descriptor: Descriptor[Any] | None, plan: Plan
) -> tuple[Descriptor[Any] | None, Plan]:
    """Return a connector as it is called in a plan, and the plan with a record of it.

    One whose calls at layers its options do not insist on goes without them where there can be none.
    """
    if descriptor is None or not descriptor.capabilities.layers.support:
        return descriptor, plan
    wish, late = _by_layer(loaded, registry, descriptor), descriptor.capabilities.late_layers.support
    texts, resolved = _against_layers(loaded, plan, late=late) if wish == "may" else [], "layer by layer"
    if wish == "never" or texts:
        resolved = "whole steps"
        descriptor = evolve(descriptor, capabilities=evolve(descriptor.capabilities, layers=Flag(False)))
    elif late and (phases := " and ".join(_captured(plan))):
        texts = [f"in {phases} steps behind the pass, since attention is inside their graphs"]
    origin = "; ".join(texts) or f"the options of kv_connector {descriptor.name!r}"
    setting = Setting(key="kv_connector transfers", asked=wish, resolved=resolved, origin=origin)
    return descriptor, evolve(plan, settings=(*plan.settings, setting))


def _by_layer(loaded: LoadedConfig, registry: PluginRegistry, descriptor: Descriptor[Any]) -> str:
    """Return whether a connector ``must`` be called at each layer, ``may`` be, or ``never`` is."""
    if not descriptor.capabilities.layers.support:
        return "never"
    options = registry.options(loaded, descriptor)
    return str(options.by_layer()) if hasattr(options, "by_layer") else "must"


def _captured(plan: Plan) -> dict[str, str]:
    """Return the phases whose graphs have attention inside, each with a group of such layers."""
    return {phase: group.name for group in plan.groups for phase, state in group.graphs if state == "captured"}


def _against_layers(loaded: LoadedConfig, plan: Plan, *, late: bool = False) -> list[str]:
    """Return the reasons why a connector cannot be called at each layer.

    Args:
        late: whether calls may come behind a captured pass.
    """
    texts = [
        f"it declares layers, and the attention of {name} layers is inside the graphs of {phase} steps "
        f"(graphs.mode = {plan.graphs.asked!r}): nothing can be called between layers there"
        for phase, name in ({} if late else _captured(plan)).items()
    ]
    parallel, microbatches = loaded.config.parallel, loaded.config.scheduler.microbatches
    if parallel.pipeline not in (1, "auto") or microbatches > 1:
        what = f"parallel.pipeline = {parallel.pipeline!r} and scheduler.microbatches = {microbatches}"
        texts.append(f"it declares layers, and {what}: a layer does not run once in a step")
    return texts


def connector_setting(
    loaded: LoadedConfig, registry: PluginRegistry, descriptor: Descriptor[Any] | None, place: Place
) -> tuple[Setting, ...]:
    """Return the record of what a connector's options mean, and of the connectors of several ranks or replicas."""
    name, replicas, texts = loaded.config.kv_connector.name, loaded.config.parallel.data, list[str]()
    for one in () if descriptor is None else (descriptor, *inner_connectors(loaded, registry, descriptor)):
        options = registry.options(loaded, one)
        texts += [f"{one.name}: {note}" for note in options.notes()] if hasattr(options, "notes") else []
    if replicas > 1:
        texts.append(f"each of {replicas} replicas has its own")
    if (size := place.layout.replica_size) > 1:
        what = {"tensor": "heads", "pipeline": "layers"}
        owned = [text for dimension, text in what.items() if getattr(place.layout, dimension) > 1]
        own = " and ".join((*owned, *(("tokens",) if loaded.config.parallel.decode_context > 1 else ())))
        texts.append(
            f"each of {size} ranks saves and loads its own {own}; what one rank lacks or cannot load, all compute"
        )
    if not name or not texts:
        return ()
    origin = f"{loaded.origins[KEY].where}: {'; '.join(texts)}"
    return (Setting(key=KEY, asked=name, resolved=name, origin=origin, explicit=True),)


def part_of(place: Place, plan: Plan, sharing: tuple[int, ...]) -> str:
    """Return what a rank has of each block, see `KVConnectorContext.part`.

    Args:
        plan: its own.
        sharing: the ranks that share keys, this one among them. Empty if it has all keys of its heads.
    """
    if place.layout.replica_size == 1:
        return ""
    texts = [
        f"{dimension} {place.index(dimension)}/{getattr(place.layout, dimension)}"
        for dimension in ("pipeline", "tensor")
        if getattr(place.layout, dimension) > 1
    ]
    if sharing:
        texts.append(f"tokens {sharing.index(place.rank)}/{len(sharing)}")
    heads = {layer.num_kv_heads for group in plan.cache_groups for layer in group.layers}
    return ", ".join((*texts, f"{'/'.join(map(str, sorted(heads)))} KV heads"))


def _refusal(name: str, texts: list[str]) -> NegotiationError:
    return NegotiationError(f"kv_connector {name!r} cannot be used: {'; '.join(texts)}", fix=_FIX)
