"""Plan: all decisions of negotiation, with their reasons. Frozen data without factories or plugins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from attrs import asdict, evolve, field, frozen

from slotline.registry.contracts.model_family import Stage
from slotline.registry.descriptor import DeviceInfo
from slotline.registry.negotiation.groups import CacheGroupPlan, GraphPlan, GroupPlan, StateCachePlan, StateGroupPlan
from slotline.registry.negotiation.pages import PoolPlan
from slotline.registry.negotiation.reasons import Note, source_of
from slotline.registry.negotiation.request import Part, Setting
from slotline.registry.negotiation.state_memory import StateMemory
from slotline.registry.negotiation.weight_groups import WeightGroupPlan


@frozen(kw_only=True)
class Plan:
    """Decisions that an engine is built from.

    Attributes:
        device: the device it was made for.
        dtype, kv_dtype: names.
        block_size: negotiated tokens of a manager block. A cache group's own block size may be a multiple of it.
        cache_groups, groups: the decisions. A group names its cache group.
        pool: division of the pool's memory, None before the cache specs were built.
        states: division of the memory of state layers, None without them or before the specs were built.
        graphs: the graph mode.
        state_groups: the decisions for layers that keep a state instead of keys and values.
        state_caches: the cache specs that hold the states.
        weight_format: plugin that reads or makes quantized weights, in words. Empty for plain weights.
        weight_groups: the decisions for modules with quantized weights.
        downgrades: differences from the request or the usual plan. Each is an error under `strict`.
        warnings: other points that deserve the user's attention.
        notes: differences from the simplest case without any cost.
        settings: requested and resolved values, key by key.
        parts: plugins chosen elsewhere.
        facts: facts of the model.
        measured: source of the measured costs, "" without measurements.
        stages: stages of the pipeline, empty for one device.
        inline_plugins: a sentence for each inline plugin that names its file. Not part of the digest.
        digest: SHA-256 over the decisions (not over the reasons), in hex. Equal decisions have equal digests in every
            process.
    """

    device: DeviceInfo
    dtype: str
    kv_dtype: str
    block_size: int
    cache_groups: tuple[CacheGroupPlan, ...]
    groups: tuple[GroupPlan, ...]
    graphs: GraphPlan
    state_groups: tuple[StateGroupPlan, ...] = ()
    state_caches: tuple[StateCachePlan, ...] = ()
    pool: PoolPlan | None = None
    states: StateMemory | None = None
    weight_format: str = ""
    weight_groups: tuple[WeightGroupPlan, ...] = ()
    downgrades: tuple[Note, ...] = ()
    warnings: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()
    settings: tuple[Setting, ...] = ()
    parts: tuple[Part, ...] = ()
    facts: Mapping[str, Any] = field(factory=dict)
    measured: str = ""
    stages: tuple[Stage, ...] = ()
    inline_plugins: tuple[str, ...] = ()
    digest: str = field(init=False)

    @digest.default
    def _digest(self) -> str:
        return digest_of(self.decision())

    @property
    def short_digest(self) -> str:
        """First characters of the digest."""
        return self.digest[:6]

    @property
    def prefix_caching(self) -> bool:
        """True if blocks are shared between requests: requested, and possible in every cache group."""
        return any(setting.key == "cache.prefix_caching" and setting.resolved == "true" for setting in self.settings)

    def group(self, name: str) -> GroupPlan:
        """Return the group of that name. Raises KeyError if there is none."""
        return {group.name: group for group in self.groups}[name]

    def cache_group(self, name: str) -> CacheGroupPlan:
        """Return the cache group of that name. Raises KeyError if there is none."""
        return {group.name: group for group in self.cache_groups}[name]

    def with_parts(self, *parts: Part) -> Plan:
        """Return the same plan with more parts, and therefore another digest."""
        return evolve(self, parts=(*self.parts, *parts))

    def decision(self) -> dict[str, Any]:
        """Return the contents of the digest as JSON types."""
        device = self.device
        return {
            "device": {"type": device.type, "compute_capability": device.compute_capability},
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "block_size": self.block_size,
            "cache_groups": [group.decision() for group in self.cache_groups],
            "groups": [group.decision() for group in self.groups],
            **({"state_groups": [group.decision() for group in self.state_groups]} if self.state_groups else {}),
            **({"state_caches": [cache.decision() for cache in self.state_caches]} if self.state_caches else {}),
            **({"weight_groups": [group.decision() for group in self.weight_groups]} if self.weight_groups else {}),
            "graphs": self.graphs.decision(),
            **({} if self.pool is None else {"pool": self.pool.to_json()}),
            **({} if self.states is None else {"states": self.states.to_json()}),
            "settings": {setting.key: setting.resolved for setting in self.settings},
            "parts": [_part(part) for part in self.parts],
            "facts": {key: _plain(value) for key, value in self.facts.items()},
            **({"stages": self._stages()} if self.stages else {}),  # keeps the digest of a plan for one device
        }

    def _stages(self) -> list[dict[str, Any]]:
        return [{"name": f"stage {index}", **asdict(stage)} for index, stage in enumerate(self.stages)]

    def to_json(self) -> dict[str, Any]:
        """Return the whole plan as JSON types, reasons included."""
        return {
            "ok": True,
            "digest": self.digest,
            **self.decision(),
            "device": _device(self.device),
            "graphs": self.graphs.to_json(),
            "measured": self.measured,
            "cache_groups": [group.to_json() for group in self.cache_groups],
            "groups": [group.to_json() for group in self.groups],
            "state_groups": [group.to_json() for group in self.state_groups],
            "state_caches": [cache.to_json() for cache in self.state_caches],
            **(
                {
                    "weight_format": self.weight_format,
                    "weight_groups": [group.to_json() for group in self.weight_groups],
                }
                if self.weight_format
                else {}
            ),
            "settings": [setting.to_json() for setting in self.settings],
            "stages": self._stages(),
            "inline_plugins": list(self.inline_plugins),
            "downgrades": [note.to_json() for note in self.downgrades],
            "warnings": [note.to_json() for note in self.warnings],
            "notes": [note.to_json() for note in self.notes],
        }

    def explain(self, width: int = 100) -> str:
        """Return the plan and its reasons as text, at most `width` columns wide if words allow."""
        from slotline.registry.negotiation.explain import explain_plan

        return explain_plan(self, width)

    def summary(self) -> str:
        """Return one line for the log."""
        groups: tuple[GroupPlan | StateGroupPlan, ...] = (*self.groups, *self.state_groups)
        backends = ", ".join(f"{group.name}={group.backend}" for group in groups)
        changed = " ".join(dict.fromkeys(note.code for note in self.downgrades))
        shape = f"block {self.block_size}, {self.dtype}/{self.kv_dtype}, graphs {self.graphs.resolved}"
        shape += f", {len(self.stages)} stages" if self.stages else ""
        return f"plan {self.short_digest}: {backends}; {shape}" + (f"; changed: {changed}" if changed else "")


def digest_of(decision: Mapping[str, Any]) -> str:
    """Return the SHA-256 in hex over canonical JSON: sorted keys, no spaces, ASCII."""
    text = json.dumps(decision, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _part(part: Part) -> dict[str, Any]:
    return {**source_of(part), "kind": part.kind, "name": part.name, "contract": part.contract}


def _device(device: DeviceInfo) -> dict[str, Any]:
    capability = None if device.compute_capability is None else list(device.compute_capability)
    return {"type": device.type, "name": device.name, "compute_capability": capability}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else str(value)
