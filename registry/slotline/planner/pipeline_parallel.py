"""Pipeline parallelism: the devices of the stages, and the layers of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from attrs import evolve, frozen

from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import AttentionLayer, ModelFacts, ModelParts, Stage, StateLayer
from slotline.registry.contracts.device import Device
from slotline.registry.descriptor import Descriptor, DeviceInfo
from slotline.registry.devices import Devices, called
from slotline.registry.errors import ConfigError, NegotiationError

_KEY = "parallel.pipeline"
Layer = TypeVar("Layer", AttentionLayer, StateLayer)


@frozen
class Stages:
    """Placement of the model's parts.

    Attributes:
        stages: in the order of a forward pass. A single stage if nothing is divided.
        of_layer: the stage of each of the model's attention layers, by layer index. -1 for a layer that is with
            another rank.
        of_state: the same of its state layers, if they are divided.
    """

    stages: tuple[Stage, ...]
    of_layer: tuple[int, ...]
    of_state: tuple[int, ...] = ()

    @property
    def divided(self) -> tuple[Stage, ...]:
        """Return the stages if there are several, else an empty tuple."""
        return self.stages if len(self.stages) > 1 else ()

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the stages' devices without repetition."""
        return tuple(dict.fromkeys(stage.device for stage in self.stages))

    def device_of(self, layer: AttentionLayer) -> str:
        """Return the device of an attention layer."""
        return self.stages[self.of_layer[layer.index]].device

    def holds(self, layer: AttentionLayer | StateLayer) -> bool:
        """Return True for a layer that this process has."""
        of = self.of_state if isinstance(layer, StateLayer) else self.of_layer
        return not of or of[layer.index] >= 0

    def own(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """Return those of some layers that this process has."""
        return tuple(layer for layer in layers if self.holds(layer))

    def split(self, layers: Sequence[AttentionLayer]) -> list[tuple[int, tuple[AttentionLayer, ...]]]:
        """Group attention layers by stage. Stages without any are left out."""
        parts: dict[int, list[AttentionLayer]] = {}
        for layer in self.own(layers):
            parts.setdefault(self.of_layer[layer.index], []).append(layer)
        return [(stage, tuple(parts[stage])) for stage in sorted(parts)]


def pipeline_devices(loaded: LoadedConfig, devices: Devices) -> tuple[Device, ...]:
    """Return the device of each stage, at least one. Nothing needs to be known of the model yet.

    Raises:
        ConfigError: if a device is missing, or if the devices are of different types.
    """
    config, asked = loaded.config, loaded.config.parallel.pipeline
    own = devices.named(config.device)
    if isinstance(asked, int):  # so many ranks, each with one device
        return (own,)
    named = named_devices(devices, asked, key=_KEY)
    kinds = {device.name.partition(":")[0] for device in named}
    if loaded.origins["device"].kind != "default":
        kinds.add(own.name.partition(":")[0])
    if len(kinds) > 1:
        raise ConfigError(
            f"{_KEY} = {list(asked)} with device = {config.device!r}: devices of different types, "
            f"{' and '.join(sorted(kinds))}",
            fix="name devices of one type; their backends, caches and dtypes are chosen once for all",
        )
    return named


def describe_devices(devices: Devices, named: Sequence[Device]) -> DeviceInfo:
    """Return the facts that hold on every stage's device.

    Raises:
        ConfigError: if the devices differ in compute capability, so that kernels for one may not run on another.
    """
    infos = [devices.info(device) for device in named]
    if len({info.compute_capability for info in infos}) > 1:
        names = [device.name for device in named]
        told = ", ".join(f"{device}: {info.name}" for device, info in zip(names, infos, strict=True))
        raise ConfigError(
            f"{_KEY} = {names}: devices of different types ({told})",
            fix="name devices of the same compute capability",
        )
    return evolve(infos[0], total_memory=min(info.total_memory for info in infos))


def divide(
    loaded: LoadedConfig,
    devices: Sequence[str],
    facts: ModelFacts,
    family: Descriptor[Any],
    *,
    capability: str = "pipeline",
) -> Stages:
    """Give each device its layers.

    Args:
        capability: of the family, that it can do so.

    Raises:
        NegotiationError: if the family or the model cannot be divided that way.
    """
    if len(devices) == 1:
        return _undivided(loaded, devices[0], facts)
    asked = f"{_KEY} = {loaded.config.parallel.pipeline!r}"
    refusal, parts = getattr(family.capabilities, capability).refusal(True), facts.parts
    if facts.state_layers and capability == "pipeline":
        parts = None
    if refusal is not None or parts is None:
        raise NegotiationError(
            f"{asked}: model family {family.name!r} cannot divide the model: "
            f"{f'{capability}: {refusal}' if refusal else 'it does not say what parts the model has'}",
            fix=f"remove {_KEY}, or use a model family that declares {capability}",
        )
    if loaded.config.offload_gib:
        raise NegotiationError(
            f"{asked} with offload_gib = {loaded.config.offload_gib}: weights are either divided or offloaded",
            fix="remove one of the two",
        )
    if len(devices) > len(parts.layers):
        raise NegotiationError(
            f"{asked}: {len(devices)} stages for {len(parts.layers)} layers",
            fix=f"name at most {len(parts.layers)} devices",
        )
    counts = _layers_asked(loaded, len(devices), len(parts.layers)) or balanced(parts, len(devices))
    stages = tuple(
        Stage(device=device, first_layer=first, end_layer=end, num_parameters=_parameters(parts, first, end))
        for device, (first, end) in zip(devices, pairwise(accumulate(counts, initial=0)), strict=True)
    )
    owners = [index for index, count in enumerate(counts) for _ in range(count)]
    attention, states = (tuple(owners[layer] for layer in of) for of in (parts.attention, parts.states))
    divided = Stages(stages, attention, of_state=states)
    _refuse_shared_caches(divided, facts)
    return divided


def balanced(parts: ModelParts, num_stages: int) -> tuple[int, ...]:
    """Split the layers so that the largest stage has the fewest parameters, then the second largest, and so on."""
    total = len(parts.layers)
    # best[end]: loads of the stages so far, largest first, and their numbers of layers, over layers 0 .. end - 1
    best: dict[int, tuple[list[int], tuple[int, ...]]] = {0: ([], ())}
    for stage in range(num_stages):
        last, found = stage == num_stages - 1, dict[int, tuple[list[int], tuple[int, ...]]]()
        for end in [total] if last else range(stage + 1, total):
            found[end] = min(
                (sorted([*loads, _parameters(parts, first, end)], reverse=True), (*counts, end - first))
                for first, (loads, counts) in best.items()
                if first < end
            )
        best = found
    return best[total][1]


def _undivided(loaded: LoadedConfig, device: str, facts: ModelFacts) -> Stages:
    if loaded.config.parallel.layers:
        raise ConfigError(
            f"parallel.layers = {list(loaded.config.parallel.layers)} without stages",
            fix=f"name their devices in {_KEY}, or remove the key",
        )
    layers = len(facts.parts.layers) if facts.parts else len(facts.layers)
    whole = Stage(device=device, first_layer=0, end_layer=layers, num_parameters=facts.num_parameters)
    return Stages((whole,), (0,) * len(facts.layers))


def named_devices(devices: Devices, names: Sequence[str], *, key: str) -> tuple[Device, ...]:
    """Return the devices that a key names, each with its number if there can be several.

    Raises:
        ConfigError: if a device is missing.
    """
    return tuple(devices.numbered(devices.named(name, key=key)) for name in names)


def first_devices(devices: Devices, own: Device, count: int, *, key: str) -> tuple[Device, ...]:
    """Return the first `count` devices of a type. A device in host memory counts as one, which then holds every part.

    Raises:
        ConfigError: if there are fewer devices, or if `own` names a single device by number.
    """
    kind, _, index = own.name.partition(":")
    if devices.descriptor(own).capabilities.host_memory.support:
        return (own,) * count
    if index and devices.is_explicit(own):
        raise ConfigError(
            f"{key} = {count} with device = {own.name!r}, which names one device",
            fix=f'set device = "{kind}", or list the devices in {key}',
        )
    if count > (there := devices.count(kind)):
        raise ConfigError(
            f"{key} = {count}, and there are {there} {called(kind)} devices", fix=f"set {key} = {there} or less"
        )
    return tuple(devices.named(f"{kind}:{number}", key=key) for number in range(count))


def _layers_asked(loaded: LoadedConfig, num_stages: int, num_layers: int) -> tuple[int, ...]:
    asked = loaded.config.parallel.layers
    if asked and (len(asked) != num_stages or sum(asked) != num_layers or min(asked) < 1):
        raise NegotiationError(
            f"parallel.layers = {list(asked)}: {num_stages} stages need as many numbers from 1 on, and they must sum "
            f"to the model's {num_layers} layers, not {sum(asked)}",
            fix="correct the numbers, or remove the key to balance the stages",
        )
    return asked


def _parameters(parts: ModelParts, first: int, end: int) -> int:
    """Count the parameters of a stage that holds layers `first` .. `end` - 1."""
    ends = (parts.embedding if first == 0 else 0) + (parts.head if end == len(parts.layers) else 0)
    return sum(parts.layers[first:end]) + ends


def _refuse_shared_caches(stages: Stages, facts: ModelFacts) -> None:
    for layer in facts.layers:
        for owner, read in ((layer.shares_kv_with, "reads the cache of"), (layer.index_from, "uses the picks of")):
            if owner is not None and stages.of_layer[owner] != stages.of_layer[layer.index]:
                raise NegotiationError(
                    f"layer {layer.name!r} in stage {stages.of_layer[layer.index]} {read} "
                    f"{facts.layers[owner].name!r} in stage {stages.of_layer[owner]}",
                    fix="set parallel.layers so that both lie in one stage",
                )
