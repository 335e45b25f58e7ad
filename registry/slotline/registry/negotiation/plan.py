"""The plan: everything negotiation decided, with the record of why. Frozen data; it holds no factory and no plugin."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from attrs import asdict, evolve, field, frozen

from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.model_family import Stage
from slotline.registry.contracts.state import StateLayer
from slotline.registry.descriptor import DeviceInfo
from slotline.registry.negotiation.pages import PoolPlan
from slotline.registry.negotiation.request import Part, Setting
from slotline.registry.negotiation.state_memory import StateMemory

CAPTURED = "captured"
EAGER = "eager"
NONE = "none"
"""How a group runs in a phase: inside the graph, as a break in the graph, or without any graph."""

PHASES = ("decode", "verify", "mixed")
"""One query token per request; 1 + draft tokens per request; any mix of prefill and decode."""


@frozen(kw_only=True)
class Reason:
    """Why a candidate was not chosen.

    Attributes:
        code: a key of `codes.CODES`.
        text: what was needed and what was offered, one line.
        origin: who needed it.
    """

    code: str
    text: str
    origin: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "text": self.text, "origin": self.origin}


@frozen(kw_only=True)
class Rejection:
    """A candidate that lost in one group, with every reason found."""

    name: str
    distribution: str = ""
    version: str = ""
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, Any]:
        return {**_source(self), "name": self.name, "reasons": [reason.to_json() for reason in self.reasons]}


@frozen(kw_only=True)
class Note:
    """Something that came out otherwise than asked, or that the user should know.

    Attributes:
        code: a key of `codes.CODES`.
        key: the configuration key it concerns.
        text: what happened, one line.
        asked, resolved: the two values.
        because: every party that limits it.
        to_avoid: settings with which the note goes away; each was tried.
    """

    code: str
    key: str
    text: str
    asked: str = ""
    resolved: str = ""
    because: tuple[str, ...] = ()
    to_avoid: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "key": self.key,
            "text": self.text,
            "asked": self.asked,
            "resolved": self.resolved,
            "because": list(self.because),
            "to_avoid": list(self.to_avoid),
        }


@frozen(kw_only=True)
class GraphPlan:
    """The graph mode over all groups.

    Attributes:
        asked, resolved: modes by their configuration names.
        phases: (phase, ``full``, ``piecewise`` or ``none``) for each phase that occurs; ``full`` when every group is
            captured, ``piecewise`` when the graph is broken at one group at least.
        reason: why this mode, where it is not simply the one asked for.
        measured: what the modes take that were timed with these backends; it is no part of the decision.
    """

    asked: str
    resolved: str
    phases: tuple[tuple[str, str], ...]
    reason: str = ""
    measured: str = ""

    def decision(self) -> dict[str, Any]:
        """What was decided."""
        return {"asked": self.asked, "resolved": self.resolved, "phases": dict(self.phases), "reason": self.reason}

    def to_json(self) -> dict[str, Any]:
        return {**self.decision(), "measured": self.measured}


@frozen(kw_only=True)
class CacheGroupPlan:
    """Layers that share one block table.

    Attributes:
        name: the spec's name, with the window where windows differ.
        kv_spec: the plugin; `distribution`, `version`, `contract` say which.
        kinds: the layer kinds it holds; `inexact` those that it holds with waste.
        layers: those that own a cache, in model order.
        block_size, kernel_block_size: tokens; the second divides the first.
        layout: physical order inside a kernel block.
        reason: why this spec; rejected: the others.
    """

    name: str
    kv_spec: str
    distribution: str = ""
    version: str = ""
    contract: int = 1
    kinds: tuple[str, ...]
    inexact: tuple[str, ...] = ()
    layers: tuple[AttentionLayer, ...]
    block_size: int
    kernel_block_size: int
    layout: str
    reason: str = ""
    rejected: tuple[Rejection, ...] = ()

    def decision(self) -> dict[str, Any]:
        """What was decided, without the reasons."""
        return {
            **_source(self),
            "name": self.name,
            "kv_spec": self.kv_spec,
            "contract": self.contract,
            "kinds": list(self.kinds),
            "inexact": list(self.inexact),
            "layers": [layer.name for layer in self.layers],
            "block_size": self.block_size,
            "kernel_block_size": self.kernel_block_size,
            "layout": self.layout,
        }

    def to_json(self) -> dict[str, Any]:
        return {**self.decision(), "reason": self.reason, "rejected": [item.to_json() for item in self.rejected]}


@frozen(kw_only=True)
class GroupPlan:
    """One attention group and the backend that serves it.

    Attributes:
        name: the group's name.
        layers: in model order.
        backend: the plugin; `distribution`, `version`, `contract`, `inline` say which.
        cache_group: name of the `CacheGroupPlan` that its layers belong to, "" for layers without a cache.
        kv_spec, block_size, kernel_block_size, layout: those of the cache group.
        dtype, kv_dtype: names.
        query_len: most query tokens of a uniform decode batch; max_query_len: of any batch.
        graphs: (phase, ``captured``, ``eager`` or ``none``) for each phase that occurs.
        cascade: how a prefix that all requests share is served apart: ``captured`` where graphs hold it, ``eager``, or
            ``none`` where it is not.
        kv_scales: of an eight-bit cache, ``checkpoint``, ``calculate`` or ``1``; empty for other caches.
        fast_prefill: whether the layers, which all read other layers' caches, are run for the tokens alone whose logits
            are wanted, in steps that run without a graph.
        reason: why this backend.
        rejected: the others, in the candidates' order.
    """

    name: str
    layers: tuple[AttentionLayer, ...]
    backend: str
    distribution: str = ""
    version: str = ""
    contract: int = 1
    inline: bool = False
    cache_group: str = ""
    kv_spec: str = ""
    block_size: int
    kernel_block_size: int
    layout: str
    dtype: str
    kv_dtype: str
    query_len: int = 1
    max_query_len: int = 1
    graphs: tuple[tuple[str, str], ...] = ()
    cascade: str = NONE
    kv_scales: str = ""
    fast_prefill: bool = False
    reason: str = ""
    rejected: tuple[Rejection, ...] = ()

    def captured(self, phase: str) -> bool:
        """Whether the group's attention is inside the graph of a phase."""
        return dict(self.graphs).get(phase) == CAPTURED

    def decision(self) -> dict[str, Any]:
        """What was decided, without the reasons."""
        return {
            **_source(self),
            "name": self.name,
            "layers": [layer.name for layer in self.layers],
            "backend": self.backend,
            "contract": self.contract,
            "inline": self.inline,
            "cache_group": self.cache_group,
            "kv_spec": self.kv_spec,
            "block_size": self.block_size,
            "kernel_block_size": self.kernel_block_size,
            "layout": self.layout,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "query_len": self.query_len,
            "max_query_len": self.max_query_len,
            "graphs": dict(self.graphs),
            "cascade": self.cascade,
            "kv_scales": self.kv_scales,
            **({"fast_prefill": True} if self.fast_prefill else {}),
        }

    def to_json(self) -> dict[str, Any]:
        return {**self.decision(), "reason": self.reason, "rejected": [item.to_json() for item in self.rejected]}


@frozen(kw_only=True)
class StateGroupPlan:
    """State layers of one kind and the backend that serves them. Each request has one slot of state in every layer.

    Attributes:
        name: the group's name.
        layers: in model order; their tensors have resolved dtypes.
        backend: the plugin; `distribution`, `version`, `contract`, `inline` say which.
        dtype, state_dtype: names, of activations and of recurrent states.
        max_query_len: most tokens of one request in a batch.
        graphs: (phase, ``captured``, ``eager`` or ``none``) for each phase that occurs.
        reason: why this backend.
        rejected: the others, in the candidates' order.
    """

    name: str
    layers: tuple[StateLayer, ...]
    backend: str
    distribution: str = ""
    version: str = ""
    contract: int = 1
    inline: bool = False
    dtype: str
    state_dtype: str
    max_query_len: int = 1
    graphs: tuple[tuple[str, str], ...] = ()
    reason: str = ""
    rejected: tuple[Rejection, ...] = ()

    def captured(self, phase: str) -> bool:
        """Whether the group's layers are inside the graph of a phase."""
        return dict(self.graphs).get(phase) == CAPTURED

    def decision(self) -> dict[str, Any]:
        """What was decided, without the reasons."""
        return {
            **_source(self),
            "name": self.name,
            "layers": [layer.name for layer in self.layers],
            "backend": self.backend,
            "contract": self.contract,
            "inline": self.inline,
            "tensors": {t.name: {"shape": list(t.shape), "dtype": t.dtype} for t in self.layers[0].tensors},
            "dtype": self.dtype,
            "state_dtype": self.state_dtype,
            "max_query_len": self.max_query_len,
            "graphs": dict(self.graphs),
        }

    def to_json(self) -> dict[str, Any]:
        return {**self.decision(), "reason": self.reason, "rejected": [item.to_json() for item in self.rejected]}


@frozen(kw_only=True)
class Plan:
    """What the engine is built from.

    Attributes:
        device: the machine it was made for.
        dtype, kv_dtype: names.
        block_size: tokens of a manager block as negotiated; a cache group's own may be a multiple of it.
        cache_groups, groups: the decisions; a group names its cache group.
        pool: how the pool's memory is cut; None where nobody asked the cache specs.
        states: how the memory of state layers is cut; None without them, or where nobody asked.
        graphs: the graph mode.
        state_groups: the decisions for layers that keep a state instead of keys and values.
        downgrades: what came out otherwise than asked or than usual; an error each under `strict`.
        warnings: what the user should look at besides.
        notes: what differs from the plainest case without any cost.
        settings: asked and resolved, key by key.
        parts: plugins chosen elsewhere.
        facts: what is known of the model.
        measured: where measured costs come from, "" where nothing was measured.
        stages: of the pipeline; empty for one device.
        digest: SHA-256 over the decisions (not over the reasons), in hex; equal in every process that decided the same.
    """

    device: DeviceInfo
    dtype: str
    kv_dtype: str
    block_size: int
    cache_groups: tuple[CacheGroupPlan, ...]
    groups: tuple[GroupPlan, ...]
    graphs: GraphPlan
    state_groups: tuple[StateGroupPlan, ...] = ()
    pool: PoolPlan | None = None
    states: StateMemory | None = None
    downgrades: tuple[Note, ...] = ()
    warnings: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()
    settings: tuple[Setting, ...] = ()
    parts: tuple[Part, ...] = ()
    facts: Mapping[str, Any] = field(factory=dict)
    measured: str = ""
    stages: tuple[Stage, ...] = ()
    digest: str = field(init=False)

    @digest.default
    def _digest(self) -> str:
        return digest_of(self.decision())

    @property
    def short_digest(self) -> str:
        return self.digest[:6]

    @property
    def prefix_caching(self) -> bool:
        """Whether blocks are shared between requests: asked for, and possible in every cache group."""
        return any(setting.key == "cache.prefix_caching" and setting.resolved == "true" for setting in self.settings)

    def group(self, name: str) -> GroupPlan:
        """The group of that name; raises KeyError."""
        return {group.name: group for group in self.groups}[name]

    def cache_group(self, name: str) -> CacheGroupPlan:
        """The cache group of that name; raises KeyError."""
        return {group.name: group for group in self.cache_groups}[name]

    def with_parts(self, *parts: Part) -> Plan:
        """The same plan with more parts on record, and so another digest."""
        return evolve(self, parts=(*self.parts, *parts))

    def decision(self) -> dict[str, Any]:
        """What the digest covers, as JSON types."""
        device = self.device
        return {
            "device": {"type": device.type, "compute_capability": device.compute_capability},
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "block_size": self.block_size,
            "cache_groups": [group.decision() for group in self.cache_groups],
            "groups": [group.decision() for group in self.groups],
            **({"state_groups": [group.decision() for group in self.state_groups]} if self.state_groups else {}),
            "graphs": self.graphs.decision(),
            **({} if self.pool is None else {"pool": self.pool.to_json()}),
            **({} if self.states is None else {"states": self.states.to_json()}),
            "settings": {setting.key: setting.resolved for setting in self.settings},
            "parts": [_part(part) for part in self.parts],
            "facts": {key: _plain(value) for key, value in self.facts.items()},
            **({"stages": self._stages()} if self.stages else {}),  # one device has the digest that it always had
        }

    def _stages(self) -> list[dict[str, Any]]:
        return [{"name": f"stage {index}", **asdict(stage)} for index, stage in enumerate(self.stages)]

    def to_json(self) -> dict[str, Any]:
        """The whole plan as JSON types, the record of reasons included."""
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
            "settings": [setting.to_json() for setting in self.settings],
            "stages": self._stages(),
            "downgrades": [note.to_json() for note in self.downgrades],
            "warnings": [note.to_json() for note in self.warnings],
            "notes": [note.to_json() for note in self.notes],
        }

    def explain(self, width: int = 100) -> str:
        """The plan and its reasons as text, `width` columns wide at most where words allow."""
        from slotline.registry.negotiation.explain import explain_plan

        return explain_plan(self, width)

    def summary(self) -> str:
        """One line for the log."""
        groups: tuple[GroupPlan | StateGroupPlan, ...] = (*self.groups, *self.state_groups)
        backends = ", ".join(f"{group.name}={group.backend}" for group in groups)
        changed = " ".join(dict.fromkeys(note.code for note in self.downgrades))
        shape = f"block {self.block_size}, {self.dtype}/{self.kv_dtype}, graphs {self.graphs.resolved}"
        shape += f", {len(self.stages)} stages" if self.stages else ""
        return f"plan {self.short_digest}: {backends}; {shape}" + (f"; changed: {changed}" if changed else "")


@frozen(kw_only=True)
class Conflict:
    """One member of a minimal set of needs that cannot hold together.

    Attributes:
        key: the configuration key, or ``model.<need>`` or ``device`` for what is given.
        value: what was asked.
        origin: who asked.
        inherent: True if the model or the device brings it, so that no setting takes it away.
        sufficient: True if a plan exists once this need alone is given up.
        instead: what to set then, a plan that was tried; "" if giving it up does not help.
    """

    key: str
    value: str
    origin: str
    inherent: bool = False
    sufficient: bool = False
    instead: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "value": self.value,
            "origin": self.origin,
            "inherent": self.inherent,
            "sufficient": self.sufficient,
            "instead": self.instead,
        }


@frozen(kw_only=True)
class GroupFailure:
    """What each candidate lacked for one group (of attention or state layers, or a layer kind for cache specs)."""

    name: str
    kind: str
    layers: int
    rejected: tuple[Rejection, ...]

    def to_json(self) -> dict[str, Any]:
        rejected = [item.to_json() for item in self.rejected]
        return {"name": self.name, "kind": self.kind, "layers": self.layers, "rejected": rejected}


@frozen(kw_only=True)
class Failure:
    """The record of a negotiation that found no plan; the data behind `NegotiationError`.

    Attributes:
        code: what failed, a key of `codes.CODES`.
        message: one line.
        groups: all rejections with all reasons.
        conflict: the minimal set of needs that exclude each other; empty if nothing was asked that could be given up.
        further: conflicts that remain once the first is resolved; no two share a member.
        remedies: settings that make a plan possible, each tried.
        notes: under `strict`, the downgrades that may not pass.
    """

    code: str
    message: str
    groups: tuple[GroupFailure, ...] = ()
    conflict: tuple[Conflict, ...] = ()
    further: tuple[tuple[Conflict, ...], ...] = ()
    remedies: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": False,
            "code": self.code,
            "message": self.message,
            "groups": [group.to_json() for group in self.groups],
            "conflict": [member.to_json() for member in self.conflict],
            "further": [[member.to_json() for member in members] for members in self.further],
            "inherent": self.inherent,
            "remedies": list(self.remedies),
            "notes": [note.to_json() for note in self.notes],
        }

    @property
    def inherent(self) -> bool:
        """True if nothing the user can set is part of the conflict."""
        return not self.notes and all(member.inherent for member in self.conflict)


def digest_of(decision: Mapping[str, Any]) -> str:
    """SHA-256 in hex over canonical JSON: sorted keys, no spaces, ASCII."""
    text = json.dumps(decision, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _source(item: Any) -> dict[str, Any]:
    return {"distribution": item.distribution, "version": item.version}


def _part(part: Part) -> dict[str, Any]:
    return {**_source(part), "kind": part.kind, "name": part.name, "contract": part.contract}


def _device(device: DeviceInfo) -> dict[str, Any]:
    capability = None if device.compute_capability is None else list(device.compute_capability)
    return {"type": device.type, "name": device.name, "compute_capability": capability}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else str(value)
