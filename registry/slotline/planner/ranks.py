"""Ranks of an engine: their layout, device, communicator, and what does not work beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

from slotline.planner.best_plugin import best_plugin
from slotline.planner.component_selection import device_need
from slotline.planner.experts import refuse_experts, replicas_share_experts, with_experts
from slotline.planner.refusals import cannot_hold
from slotline.registry.capability import GraphSupport
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import ModelFacts
from slotline.registry.contracts.device import Device
from slotline.registry.contracts.model_family import ModelFamily, Shard
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.devices import Devices, called
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import ConfigError, NegotiationError
from slotline.registry.negotiation import Need, Part, Setting
from slotline.registry.ranks import DIMENSIONS, Place, RankLayout

KEY = "parallel.tensor"
SEQUENCE = "parallel.sequence"
COMMUNICATOR = "parallel.communicator"


def layout_of(loaded: LoadedConfig) -> RankLayout:
    """Return the numbers of ranks that a configuration asks for. Replicas count if they share experts."""
    parallel = loaded.config.parallel
    return RankLayout(
        data=parallel.data if replicas_share_experts(loaded) else 1,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline if isinstance(parallel.pipeline, int) else 1,
    )


def rank_device(loaded: LoadedConfig, there: Devices, place: Place) -> Device:
    """Return the device of a rank: the one of its number on its machine. Ranks share a device in host memory.

    Raises:
        ConfigError: if the machine has fewer devices than ranks, or the configuration names one device by number.
    """
    own = there.named(loaded.config.device)
    if there.descriptor(own).capabilities.host_memory.support:
        return own
    name, _, index = own.name.partition(":")
    keys = " x ".join(keys_of(place.layout)) or "parallel.data"
    asked = asked_for(place.layout) or f"parallel.data = {loaded.config.parallel.data}"
    if index and there.is_explicit(own):
        raise ConfigError(
            f"{asked} with device = {own.name!r}, which names one device",
            fix=f'set device = "{name}"',
        )
    count, here = there.count(name), place.local_size or place.size
    if here > count and place.local_rank < count:
        raise ConfigError(
            f"{asked}: {here} ranks on this machine have a device each, and there are {count} {called(name)} devices",
            fix=f"set {keys} = {count} or less, or start ranks on more machines with torchrun",
        )
    if place.local_rank >= count:
        raise ConfigError(
            f"rank {place.rank} would be on {called(name)} device {place.local_rank}, and there are {count}: "
            f"{place.size} ranks are asked for ({asked})",
            fix=f"set {keys} = {count} or less, or start ranks on more machines with torchrun",
        )
    return there.named(f"{name}:{place.local_rank}")


def asked_for(layout: RankLayout) -> str:
    """Return the keys that ask for several ranks, with their values."""
    return " and ".join(f"{key} = {getattr(layout, key.partition('.')[2])}" for key in keys_of(layout))


def keys_of(layout: RankLayout) -> list[str]:
    """Return the keys that ask for several ranks."""
    return [f"parallel.{name}" for name in reversed(DIMENSIONS) if getattr(layout, name) > 1]


def shard_of(place: Place) -> Shard | None:
    """Return the part of each layer that a rank has, None for the whole."""
    replicas, size = place.layout.data, place.layout.tensor
    if size > 1:
        return Shard(rank=place.index("tensor"), size=size, replicas=replicas, replica=place.index("data"))
    return None if replicas == 1 else Shard(rank=place.index("data"), size=replicas, own_tokens=True)


def asked_shard(loaded: LoadedConfig, place: Place) -> Shard | None:
    """Return the part of each layer that a rank has, as the configuration divides it. None for the whole."""
    shard = shard_of(place)
    return None if shard is None else with_experts(loaded, evolve(shard, sequence=loaded.config.parallel.sequence))


def _refuse_sequence(loaded: LoadedConfig, family: Descriptor[Any], size: int) -> None:
    """Refuse hidden states divided by tokens where ranks, the family or a feature do not allow it.

    Raises:
        NegotiationError: with every reason.
    """
    config, texts = loaded.config, list[str]()
    if not config.parallel.sequence:
        return
    if size == 1:
        texts.append(f"no ranks share a layer ({KEY} = 1)")
    elif refusal := family.capabilities.sequence.refusal(True):
        texts.append(f"model family {family.name!r}: sequence {refusal}")
    if config.cache.kv_sharing_fast_prefill:
        texts.append("cache.kv_sharing_fast_prefill = true: the last layers have other tokens than the first")
    if texts:
        raise cannot_hold(loaded, SEQUENCE, "true", texts, "false")


def inspect_shard(
    loaded: LoadedConfig,
    family: ModelFamily,
    descriptor: Descriptor[Any],
    whole: ModelFacts,
    look: Mapping[str, Any],
    place: Place,
) -> ModelFacts:
    """Return the facts of a rank's part of a model.

    Args:
        whole: facts of the whole model.
        look: further arguments of `inspect`.

    Raises:
        NegotiationError: if the family or the model cannot be divided among so many ranks.
    """
    refuse_experts(loaded, whole, descriptor)
    _refuse_sequence(loaded, descriptor, place.layout.tensor)
    shard = asked_shard(loaded, place)
    if shard is None:
        return whole
    if not shard.own_tokens and (refusal := descriptor.capabilities.tensor.refusal(shard.size)):
        raise NegotiationError(
            f"{KEY} = {shard.size}: model family {descriptor.name!r}: tensor {refusal}", fix=f"set {KEY} = 1"
        )
    return family.inspect(whole.path, **look, shard=shard)  # type: ignore[call-arg]


def refuse_beside_ranks(loaded: LoadedConfig, facts: ModelFacts, place: Place, load_format: str) -> None:
    """Refuse features that do not work over several ranks.

    Args:
        load_format: form that the weights are read in.

    Raises:
        NegotiationError: with every reason.
    """
    if place.size == 1:
        return
    config, texts, key = loaded.config, list[str](), keys_of(place.layout)[0]
    if not isinstance(config.parallel.pipeline, int):
        texts.append(f"parallel.pipeline = {config.parallel.pipeline!r} divides the layers in one process")
    if config.parallel.context_shards != 1:
        texts.append(f"parallel.context_shards = {config.parallel.context_shards!r} divides the keys in one process")
    if config.offload_gib:
        texts.append(f"offload_gib = {config.offload_gib:g}: weights are either divided or offloaded")
    if load_format == "sharded" and (place.layout.tensor > 1 or place.layout.data > 1):
        texts.append(f"{facts.path} has weights that were saved after the passes of one rank")
    if texts:
        raise NegotiationError(
            f"{asked_for(place.layout)} ({loaded.origins[key].where}) cannot hold: {'; '.join(texts)}",
            fix=f"remove what it cannot hold beside, or set {' and '.join(keys_of(place.layout))} = 1",
        )


@frozen(kw_only=True)
class CommunicatorChoice:
    """The communicator of an engine with several ranks.

    Attributes:
        descriptor: the plugin's, None for one rank.
        settings: the records for the plan.
        part: the plugin for the plan.
        within_layers: whether it is called inside of forward passes, and not only between those of stages.
        own_tokens: whether each rank has tokens of its own.
        states: whether the model has layers with states.
    """

    descriptor: Descriptor[Any] | None = None
    settings: tuple[Setting, ...] = ()
    part: Part | None = None
    within_layers: bool = True
    own_tokens: bool = False
    states: bool = False

    @property
    def graphs_refusal(self) -> str | None:
        """Return the reason why no graph is captured, or None."""
        if self.own_tokens and self.states:
            return "a replica without requests would write states in a replay for the others"
        if self.descriptor is None or not self.within_layers:
            return None
        if self.descriptor.capabilities.graphs.value > GraphSupport.NEVER:
            return None
        return f"communicator {self.descriptor.name!r} cannot be captured"


def choose_communicator(
    loaded: LoadedConfig, registry: PluginRegistry, info: DeviceInfo, place: Place, dtype: str, *, states: bool
) -> CommunicatorChoice:
    """Return the communicator that the configuration names, or the one of the highest priority that fits.

    Raises:
        NegotiationError: with every reason, if none fits.
    """
    if place.size == 1:
        return CommunicatorChoice()
    largest = max(place.layout.data, place.layout.tensor, place.layout.pipeline)
    needs = [
        device_need(info),
        Need(capability="dtypes", value=dtype, origin=f"dtype {dtype}"),
        Need(capability="max_ranks", value=largest, origin=asked_for(place.layout)),
    ]
    if loaded.config.batch_invariant:
        needs.append(Need(capability="batch_invariant", value=True, origin="batch_invariant = true"))
    best = best_plugin(
        loaded,
        registry,
        info,
        Kind.COMMUNICATOR,
        COMMUNICATOR,
        loaded.config.parallel.communicator,
        needs,
        none=f"no communicator joins {place.size} ranks",
        fix=f"name or install one that fits, or set {' and '.join(keys_of(place.layout))} = 1",
    )
    return CommunicatorChoice(
        within_layers=place.layout.tensor > 1 or place.layout.data > 1,
        own_tokens=place.layout.data > 1,
        states=states,
        descriptor=best.descriptor,
        settings=(best.setting,),
        part=best.part,
    )


def tensor_setting(loaded: LoadedConfig, whole: ModelFacts, own: ModelFacts, place: Place) -> tuple[Setting, ...]:
    """Return the record of the division of layers. Empty for one rank."""
    size = place.layout.tensor
    if size == 1:
        return ()
    texts = dict.fromkeys(
        f"{a.num_heads} heads -> {b.num_heads}, {a.num_kv_heads} KV heads -> {b.num_kv_heads}"
        + (" (ranks share them)" if b.num_kv_heads * size > a.num_kv_heads else "")
        for a, b in zip(whole.layers, own.layers, strict=True)
    )
    held = f"{own.num_parameters:,} of {whole.num_parameters:,} parameters on a rank"
    division = Setting(
        key=KEY,
        asked=str(size),
        resolved=str(size),
        origin=f"{loaded.origins[KEY].where}: {'; '.join((*texts, held))}",
        explicit=True,
    )
    return (division, *_sequence_setting(loaded, size))


def _sequence_setting(loaded: LoadedConfig, size: int) -> tuple[Setting, ...]:
    """Return the record of hidden states that are divided by tokens. Empty if they are whole."""
    if not loaded.config.parallel.sequence:
        return ()
    said = f"each of {size} ranks adds and norms 1/{size} of a step's tokens, whose number is filled up to a multiple"
    return (
        Setting(
            key=SEQUENCE,
            asked="true",
            resolved="true",
            origin=f"{loaded.origins[SEQUENCE].where}: {said}",
            explicit=True,
        ),
    )
