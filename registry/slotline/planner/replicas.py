"""Replicas of data parallelism: their devices, what does not work beside them, and the record for the plan."""

from __future__ import annotations

from attrs import evolve

from slotline.planner.experts import replicas_share_experts
from slotline.planner.ranks import asked_for, keys_of, layout_of
from slotline.planner.refusals import cannot_hold
from slotline.registry.config import LoadedConfig
from slotline.registry.devices import Devices, called
from slotline.registry.errors import ConfigError
from slotline.registry.negotiation import Setting

KEY = "parallel.data"


def ranks_of_replica(loaded: LoadedConfig) -> int:
    """Return the number of ranks of each replica."""
    return layout_of(loaded).replica_size


def refuse_few_devices(loaded: LoadedConfig, there: Devices) -> None:
    """Refuse more replicas than there are devices for. In host memory they share one.

    Raises:
        ConfigError: with both numbers.
    """
    parallel, layout = loaded.config.parallel, evolve(layout_of(loaded), data=1)
    size = layout.size
    own = there.named(loaded.config.device)
    if parallel.data == 1 or there.descriptor(own).capabilities.host_memory.support:
        return
    name = own.name.partition(":")[0]
    needed, count = parallel.data * size, there.count(name)
    if needed > count:
        each = f" of {size} ranks ({asked_for(layout)})" if size > 1 else ""
        most = count // size
        raise ConfigError(
            f"{KEY} = {parallel.data} replicas{each} need {needed} {called(name)} devices, and there are {count}",
            fix=f"set {KEY} = {most}" if most else f"lower {' or '.join(keys_of(layout))}",
        )


def refuse_beside_replicas(loaded: LoadedConfig) -> None:
    """Refuse features that do not work with several replicas.

    Raises:
        NegotiationError: with every reason.
    """
    config, texts = loaded.config, list[str]()
    if config.parallel.data == 1:
        return
    if not isinstance(config.parallel.pipeline, int):
        texts.append(f"parallel.pipeline = {config.parallel.pipeline!r} divides the layers in one process")
    elif config.parallel.pipeline > 1 and replicas_share_experts(loaded):
        texts.append(f"parallel.pipeline = {config.parallel.pipeline}: the replicas share experts of all layers")
    if config.parallel.context_shards != 1:
        texts.append(f"parallel.context_shards = {config.parallel.context_shards!r} divides the keys in one process")
    if texts:
        raise cannot_hold(loaded, KEY, config.parallel.data, texts, 1)


def replicas_setting(loaded: LoadedConfig) -> tuple[Setting, ...]:
    """Return the record of the replicas. Empty for one."""
    number, size = loaded.config.parallel.data, ranks_of_replica(loaded)
    if number == 1:
        return ()
    each = "a device" if size == 1 else f"{size} devices"
    weights = "its part of the experts, all other weights" if replicas_share_experts(loaded) else "all weights"
    return (
        Setting(
            key=KEY,
            asked=str(number),
            resolved=str(number),
            origin=f"{loaded.origins[KEY].where}: each replica has {each}, {weights} and a cache of its own",
            explicit=True,
        ),
        _routing(loaded),
    )


_ROUTING = {
    "held": "replicas tell which prefixes their caches hold; a request goes where most of its own is, unless the load "
    "there is too high",
    "sent": "a request goes where most of its prefix was sent before, unless the load there is too high",
    "load": "a request goes to the replica with the least load",
}


def _routing(loaded: LoadedConfig) -> Setting:
    """Return the record of how replicas are chosen."""
    asked, key = loaded.config.parallel.routing, "parallel.routing"
    resolved, why = asked, _ROUTING[asked]
    if asked != "load" and loaded.config.cache.prefix_caching is False:
        resolved, why = "load", "cache.prefix_caching is false"
    origin = loaded.origins[key]
    return Setting(key=key, asked=asked, resolved=resolved, origin=f"{origin.where}: {why}", explicit=False)
