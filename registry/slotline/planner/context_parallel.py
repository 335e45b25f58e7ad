"""Context parallelism: choice of the devices or ranks over which the keys of a request are spread, and its checks."""

from __future__ import annotations

from math import gcd
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
from slotline.registry.negotiation.graphs import phase_state, resolved_mode
from slotline.registry.negotiation.groups import CAPTURED, EAGER
from slotline.registry.negotiation.request import CACHE_FORMATS, Asked
from slotline.registry.ranks import ALONE, Place

KEY = "parallel.context_shards"
RANKS = "parallel.decode_context"


@frozen
class ContextDevices:
    """Context shards, on devices of this process or of one on each of several ranks.

    Attributes:
        devices: torch device string of each shard of this process. A single one if keys are not divided.
        origin: where the configuration says so.
        ranks: those that share keys, by their number in the engine, this one among them. Empty if it is alone.
    """

    devices: tuple[str, ...]
    origin: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Return the number of shards."""
        return len(self.ranks) or len(self.devices)

    @property
    def divided(self) -> bool:
        """Return True if there are several shards."""
        return self.count > 1

    @property
    def asked(self) -> str:
        """Return the setting that asks for shards, with its origin."""
        return f"{self.key} = {self.count} ({self.origin})"

    @property
    def key(self) -> str:
        """Return the key of the setting that asks for shards."""
        return RANKS if self.ranks else KEY

    @property
    def fix(self) -> str:
        """Return advice for what shards cannot hold."""
        return f"remove what it cannot hold beside, or set {self.key} = 1"

    def needs(self, facts: ModelFacts) -> tuple[Need, ...]:
        """Return the capabilities that attention backends must have."""
        if not self.divided:
            return ()
        groups = {layer.num_heads * len(self.ranks) // layer.num_kv_heads for layer in facts.layers if self.ranks}
        return (
            Need(capability="lse", value=True, origin=self.asked),
            *(Need(capability="group_sizes", value=size, origin=self.asked) for size in sorted(groups)),
        )

    @property
    def graphs_refusal(self) -> str | None:
        """Return the reason why no graph is captured, or None."""
        if not self.divided or self.ranks:
            return None
        return f"attention over {self.count} context shards is planned from each step's own lengths"


def context_devices(
    loaded: LoadedConfig, there: Devices, stages: tuple[Device, ...], place: Place = ALONE
) -> ContextDevices:
    """Return the devices of the shards.

    Raises:
        ConfigError: if a device is missing, the first is not the model's, the model itself is divided, or the ranks of
            a tensor group cannot be divided.
    """
    if loaded.config.parallel.decode_context > 1:
        return _over_ranks(loaded, stages[0], place)
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


def _over_ranks(loaded: LoadedConfig, device: Device, place: Place) -> ContextDevices:
    count, size = loaded.config.parallel.decode_context, place.layout.tensor
    origin = loaded.origins[RANKS].where
    if size % count:
        raise ConfigError(
            f"{RANKS} = {count} ({origin}) does not divide the {size} ranks of parallel.tensor",
            fix=f"set {RANKS} to a divisor of {size}, or raise parallel.tensor",
        )
    if loaded.config.parallel.context_shards != 1:
        raise ConfigError(f"{RANKS} = {count} ({origin}) with {KEY}", fix="remove one of the two")
    group, first = place.group("tensor"), place.index("tensor") // count * count
    return ContextDevices((device.torch_device,), origin, group[first : first + count])


def _refuse_own_heads(shards: ContextDevices, whole: ModelFacts, place: Place) -> None:
    """Refuse ranks that share keys, but do not hold the same ones.

    Raises:
        NegotiationError: with the number of ranks that do.
    """
    size = place.layout.tensor
    same = gcd(*(size // gcd(size, layer.num_kv_heads) for layer in whole.layers))
    if same % shards.count:
        heads = ", ".join(str(count) for count in sorted({layer.num_kv_heads for layer in whole.layers}))
        holds = f"{same} of them hold the same keys" if same > 1 else "no two of them hold the same keys"
        raise NegotiationError(
            f"{shards.asked}: {whole.architecture} has {heads} KV heads over {size} ranks, so that {holds}",
            fix=f"set {RANKS} = {same}" if same > 1 else f"set {RANKS} = 1, or raise parallel.tensor",
        )


def refuse_context(
    loaded: LoadedConfig,
    shards: ContextDevices,
    facts: ModelFacts,
    drafter: Descriptor[Any] | None,
    whole: ModelFacts,
    place: Place,
) -> None:
    """Refuse shards together with features that do not support them.

    Args:
        facts: of this rank's part of the model.
        whole: of the whole model.

    Raises:
        NegotiationError: with every reason.
    """
    if not shards.divided:
        return
    if shards.ranks:
        _refuse_own_heads(shards, whole, place)
    config, texts = loaded.config, list[str]()
    kinds = {layer.kv_kind if layer.attention_type == "decoder" else layer.attention_type for layer in facts.layers}
    if others := sorted(kinds - {"full", "mla"}):
        texts.append(f"{facts.architecture} has layers of kind {', '.join(others)}, and only full ones are divided")
    if facts.state_layers:
        texts.append(f"{facts.architecture} keeps states, which are not divided")
    if any(layer.alibi_slopes or layer.position_bias for layer in facts.layers):
        texts.append(f"{facts.architecture} biases scores by distance, and a shard does not know where its keys stand")
    if config.cache.dtype in CACHE_FORMATS:
        texts.append(f"cache.dtype = {config.cache.dtype!r} stores scales beside keys and values")
    if any(layer.inputs for layer in facts.layers):
        texts.append(f"{facts.architecture} hands its layers more inputs than query, key and value")
    if any(layer.keys_ahead for layer in facts.layers):
        texts.append(f"{facts.architecture} has images whose tokens see each other, and a shard has a part of them")
    if config.scheduler.microbatches > 1:
        texts.append(f"scheduler.microbatches = {config.scheduler.microbatches}: a step passes the shards whole")
    if drafter is not None:
        texts.append(f"drafter.name = {drafter.name!r}: drafts are not verified over shards")
    if shards.ranks and config.graphs.mode == "full":
        texts.append('graphs.mode = "full": attention of steps with prompts is planned from each one\'s own lengths')
    if config.attention.cascade is True:
        texts.append("attention.cascade = true: a common prefix is not served apart in shards")
    if config.batch_invariant:
        texts.append("batch_invariant = true: how a text is cut into steps decides what is merged")
    if config.cache.calculate_kv_scales or any(scale != 1.0 for pair in facts.kv_scales.values() for scale in pair):
        texts.append("an eight-bit cache with scales is not divided")
    if config.kv_connector.name and not shards.ranks:
        texts.append(f"kv_connector.name = {config.kv_connector.name!r}: the tokens of a block lie in several caches")
    if texts:
        raise NegotiationError(f"{shards.asked} cannot hold: {'; '.join(texts)}", fix=shards.fix)


def for_shards(request: PlanRequest, shards: ContextDevices) -> PlanRequest:
    """Return the request without the features that shards never have."""
    if not shards.divided:
        return request
    return evolve(request, cascade=Asked(False, shards.key))


def _decodes_captured(plan: Plan) -> Plan:
    """Return the plan with attention over shards in graphs of decodes alone. Other graphs break at it."""
    groups = tuple(
        evolve(group, graphs=tuple((p, EAGER if s == CAPTURED and p != "decode" else s) for p, s in group.graphs))
        for group in plan.groups
    )
    states = [dict(group.graphs) for group in groups]
    phases = {phase: phase_state([state[phase] for state in states]) for phase, _ in plan.graphs.phases}
    graphs = evolve(plan.graphs, resolved=resolved_mode(phases), phases=tuple(phases.items()))
    return evolve(plan, groups=groups, graphs=graphs)


def with_shards(plan: Plan, loaded: LoadedConfig, shards: ContextDevices) -> Plan:
    """Return the plan with blocks that have a part in each shard: the negotiated block size times the number of shards.

    Raises:
        NegotiationError: if the plan does not have exactly one cache group.
    """
    if not shards.divided:
        return plan
    if len(plan.cache_groups) != 1:
        names = ", ".join(group.name for group in plan.cache_groups) or "none"
        raise NegotiationError(
            f"{shards.key} ({shards.origin}): one cache group is needed, there are: {names}", fix=shards.fix
        )
    count, parallel = shards.count, loaded.config.parallel
    where = f"{count} ranks of {parallel.tensor}" if shards.ranks else ", ".join(shards.devices)
    setting = Setting(
        key=shards.key,
        asked=str(parallel.decode_context if shards.ranks else parallel.context_shards),
        resolved=str(count),
        origin=f"{shards.origin}: a block of the pool is {count} times {plan.block_size} tokens, in turn on {where}",
        explicit=True,
    )
    plan = _decodes_captured(plan)
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
