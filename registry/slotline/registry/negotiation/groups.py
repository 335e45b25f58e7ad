"""What was decided for groups of layers, and for graphs: the parts of a `Plan`."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.state import StateLayer
from slotline.registry.negotiation.reasons import Rejection, source_of

CAPTURED = "captured"
EAGER = "eager"
NONE = "none"
"""How a group runs in a phase: inside the graph, as a break in the graph, or without any graph."""

PHASES = ("decode", "verify", "mixed")
"""One query token per request; 1 + draft tokens per request; any mix of prefill and decode."""


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

    @property
    def any_captured(self) -> bool:
        """Whether a phase is captured, whole or in pieces."""
        return any(state != "none" for _, state in self.phases)

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
            **source_of(self),
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
            ``none`` where it is not; `cascade_refusal` says why a backend that could does not for these layers.
        kv_scales: of an eight-bit cache, ``checkpoint``, ``calculate`` or ``1``; empty for other caches.
        fast_prefill: whether the layers, which all read other layers' caches, are run for the tokens alone whose logits
            are wanted, in steps that run without a graph.
        last_queries: whether the model may leave out queries of the other tokens in the last of the layers, in such
            steps: all keys and values are stored, and the backend gets a second plan.
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
    cascade_refusal: str = ""
    kv_scales: str = ""
    fast_prefill: bool = False
    last_queries: bool = False
    reason: str = ""
    rejected: tuple[Rejection, ...] = ()

    def captured(self, phase: str) -> bool:
        """Whether the group's attention is inside the graph of a phase."""
        return dict(self.graphs).get(phase) == CAPTURED

    def decision(self) -> dict[str, Any]:
        """What was decided, without the reasons."""
        return {
            **source_of(self),
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
            **({"last_queries": True} if self.last_queries else {}),
        }

    def to_json(self) -> dict[str, Any]:
        refused = {"cascade_refusal": self.cascade_refusal} if self.cascade_refusal else {}
        return {
            **self.decision(),
            **refused,
            "reason": self.reason,
            "rejected": [item.to_json() for item in self.rejected],
        }


@frozen(kw_only=True)
class StateCachePlan:
    """State layers whose memory and checkpoints one cache spec decides on.

    Attributes:
        kv_spec: the plugin; `distribution`, `version`, `contract` say which.
        kinds: the layer kinds it holds; `inexact` those that it does not name as exact.
        layers: in model order; their tensors have resolved dtypes.
        reason: why this spec; rejected: the others.
    """

    kv_spec: str
    distribution: str = ""
    version: str = ""
    contract: int = 1
    kinds: tuple[str, ...]
    inexact: tuple[str, ...] = ()
    layers: tuple[StateLayer, ...]
    reason: str = ""
    rejected: tuple[Rejection, ...] = ()

    def decision(self) -> dict[str, Any]:
        """Return the decision without its reasons."""
        return {
            **source_of(self),
            "kv_spec": self.kv_spec,
            "contract": self.contract,
            "kinds": list(self.kinds),
            "inexact": list(self.inexact),
            "layers": [layer.name for layer in self.layers],
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
        rollback_copy: whether the backend holds room for the rows' states once more, to go back to accepted drafts.
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
    rollback_copy: bool = False
    reason: str = ""
    rejected: tuple[Rejection, ...] = ()

    def captured(self, phase: str) -> bool:
        """Whether the group's layers are inside the graph of a phase."""
        return dict(self.graphs).get(phase) == CAPTURED

    def decision(self) -> dict[str, Any]:
        """What was decided, without the reasons."""
        return {
            **source_of(self),
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
            **({"rollback_copy": True} if self.rollback_copy else {}),
        }

    def to_json(self) -> dict[str, Any]:
        return {**self.decision(), "reason": self.reason, "rejected": [item.to_json() for item in self.rejected]}
