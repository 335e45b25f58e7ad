"""Context parallelism: choice of the devices over which the keys of a request are spread, and the checks for it."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from slotline.planner.pipeline_parallel import first_devices, named_devices
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import ModelFacts
from slotline.registry.contracts.device import Device
from slotline.registry.descriptor import Descriptor
from slotline.registry.devices import Devices
from slotline.registry.errors import ConfigError, NegotiationError
from slotline.registry.negotiation import Need, Plan, PlanRequest, Setting
from slotline.registry.negotiation.request import Asked

KEY = "parallel.context_shards"
_FIX = f"remove what it cannot hold beside, or set {KEY} = 1"


@frozen
class ContextDevices:
    """Torch device string of each context shard. A single device if keys are not divided."""

    devices: tuple[str, ...]
    origin: str = ""

    @property
    def divided(self) -> bool:
        """Return True if there are several shards."""
        return len(self.devices) > 1

    @property
    def needs(self) -> tuple[Need, ...]:
        """Return the capabilities that attention backends must have."""
        if not self.divided:
            return ()
        return (Need(capability="lse", value=True, origin=f"{KEY} = {len(self.devices)} ({self.origin})"),)

    @property
    def graphs_refusal(self) -> str | None:
        """Return the reason why no graph is captured, or None."""
        if not self.divided:
            return None
        return f"attention over {len(self.devices)} context shards is planned from each step's own lengths"


def context_devices(loaded: LoadedConfig, there: Devices, stages: tuple[Device, ...]) -> ContextDevices:
    """Return the devices of the shards.

    Raises:
        ConfigError: if a device is missing, the first is not the model's, or the model itself is divided.
    """
    asked, origin = loaded.config.parallel.context_shards, loaded.origins[KEY].where
    if isinstance(asked, int):
        devices = (stages[0],) if asked == 1 else first_devices(there, stages[0], asked, key=KEY)
    else:
        devices = named_devices(there, asked, key=KEY)
    if len(devices) > 1 and len(stages) > 1:
        raise ConfigError(
            f"{KEY} = {asked!r} ({origin}) with parallel.pipeline = {loaded.config.parallel.pipeline!r}",
            fix="remove one of the two",
        )
    if not isinstance(asked, int) and devices[0].name not in (stages[0].name, f"{stages[0].name}:0"):
        raise ConfigError(
            f"{KEY} = {list(asked)} ({origin}) begins with {devices[0].name!r}, and the model is on {stages[0].name!r}",
            fix=f"name {stages[0].name!r} first, or set device",
        )
    return ContextDevices(tuple(device.torch_device for device in (stages[0], *devices[1:])), origin)


def refuse_context(
    loaded: LoadedConfig, shards: ContextDevices, facts: ModelFacts, drafter: Descriptor[Any] | None
) -> None:
    """Refuse shards together with features that do not support them.

    Raises:
        NegotiationError: with every reason.
    """
    if not shards.divided:
        return
    config, texts = loaded.config, list[str]()
    kinds = {layer.kv_kind if layer.attention_type == "decoder" else layer.attention_type for layer in facts.layers}
    if others := sorted(kinds - {"full", "mla"}):
        texts.append(f"{facts.architecture} has layers of kind {', '.join(others)}, and only full ones are divided")
    if facts.state_layers:
        texts.append(f"{facts.architecture} keeps states, which are not divided")
    if any(layer.alibi_slopes is not None for layer in facts.layers):
        texts.append(f"{facts.architecture} biases scores by distance, and a shard does not know where its keys stand")
    if config.scheduler.microbatches > 1:
        texts.append(f"scheduler.microbatches = {config.scheduler.microbatches}: a step passes the shards whole")
    if drafter is not None:
        texts.append(f"drafter.name = {drafter.name!r}: drafts are not verified over shards")
    if config.attention.cascade is True:
        texts.append("attention.cascade = true: a common prefix is not served apart in shards")
    if config.batch_invariant:
        texts.append("batch_invariant = true: how a text is cut into steps decides what is merged")
    if config.cache.calculate_kv_scales or any(scale != 1.0 for pair in facts.kv_scales.values() for scale in pair):
        texts.append("an eight-bit cache with scales is not divided")
    if config.kv_connector.name:
        texts.append(f"kv_connector.name = {config.kv_connector.name!r}: it sees the blocks of one cache")
    if texts:
        raise NegotiationError(
            f"{KEY} = {len(shards.devices)} ({shards.origin}) cannot hold: {'; '.join(texts)}", fix=_FIX
        )


def for_shards(request: PlanRequest, shards: ContextDevices) -> PlanRequest:
    """Return the request without the features that shards never have."""
    if not shards.divided:
        return request
    return evolve(request, cascade=Asked(False, KEY))


def with_shards(plan: Plan, loaded: LoadedConfig, shards: ContextDevices) -> Plan:
    """Return the plan with blocks that have a part in each shard: the negotiated block size times the number of shards.

    Raises:
        NegotiationError: if the plan does not have exactly one cache group.
    """
    if not shards.divided:
        return plan
    if len(plan.cache_groups) != 1:
        names = ", ".join(group.name for group in plan.cache_groups) or "none"
        raise NegotiationError(f"{KEY} ({shards.origin}): one cache group is needed, there are: {names}", fix=_FIX)
    count = len(shards.devices)
    setting = Setting(
        key=KEY,
        asked=str(loaded.config.parallel.context_shards),
        resolved=str(count),
        origin=f"{shards.origin}: a block of the pool is {count} times {plan.block_size} tokens, in turn on "
        f"{', '.join(shards.devices)}",
        explicit=True,
    )
    return evolve(
        plan,
        block_size=count * plan.block_size,
        cache_groups=tuple(evolve(group, block_size=count * group.block_size) for group in plan.cache_groups),
        groups=tuple(
            evolve(group, block_size=count * group.block_size, last_queries=False) if group.cache_group else group
            for group in plan.groups
        ),
        settings=(*plan.settings, setting),
    )
