"""Decisions for groups of layers and for graphs: the parts of a `Plan`."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.cache_tensors import PLAIN
from slotline.registry.contracts.state import StateLayer
from slotline.registry.negotiation.reasons import Reason, Rejection, source_of

CAPTURED = "captured"
EAGER = "eager"
NONE = "none"
"""How a group runs in a phase: inside the graph, as a break in the graph, or without any graph."""

PHASES = ("decode", "verify", "mixed")
"""One query token per request; 1 + draft tokens per request; any mix of prefill and decode."""


@frozen(kw_only=True)
class GraphPlan:
    """Graph mode over all groups.

    Attributes:
        asked, resolved: modes by their configuration names.
        phases: (phase, ``full``, ``piecewise`` or ``none``) for each phase that occurs. ``full`` means that every group
            is captured, ``piecewise`` that at least one group breaks the graph.
        reason: the reason for the mode, if it is not simply the requested one.
        measured: times of the modes that were measured with these backends. Not part of the decision.
    """

    asked: str
    resolved: str
    phases: tuple[tuple[str, str], ...]
    reason: str = ""
    measured: str = ""

    @property
    def any_captured(self) -> bool:
        """True if a phase is captured, whole or in pieces."""
        return any(state != "none" for _, state in self.phases)

    def decision(self) -> dict[str, Any]:
        """Return the decision without its reasons."""
        return {"asked": self.asked, "resolved": self.resolved, "phases": dict(self.phases), "reason": self.reason}

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {**self.decision(), "measured": self.measured}


@frozen(kw_only=True)
class CacheGroupPlan:
    """Layers that share one block table.

    Attributes:
        name: the spec's name, with the window if windows differ.
        kv_spec: the plugin, identified by `distribution`, `version` and `contract`.
        kinds: the layer kinds that it holds.
        inexact: the kinds that it holds with waste.
        layers: the layers that own a cache, in model order.
        block_size, kernel_block_size: tokens. The second divides the first.
        layout: physical order inside a kernel block.
        format: format of the layers' caches.
        reason: the reason for this spec.
        rejected: the other specs.
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
    format: str = PLAIN
    reason: str = ""
    rejected: tuple[Rejection, ...] = ()

    def decision(self) -> dict[str, Any]:
        """Return the decision without its reasons."""
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
            **({"format": self.format} if self.format != PLAIN else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {**self.decision(), "reason": self.reason, "rejected": [item.to_json() for item in self.rejected]}


@frozen(kw_only=True)
class GroupPlan:
    """Attention group and its backend.

    Attributes:
        name: the group's name.
        layers: in model order.
        backend: the plugin, identified by `distribution`, `version`, `contract` and `inline`.
        cache_group: name of the `CacheGroupPlan` that its layers belong to, "" for layers without a cache.
        kv_spec, block_size, kernel_block_size, layout: values of the cache group.
        dtype, kv_dtype: names.
        query_len: most query tokens of one request in a uniform decode batch.
        max_query_len: most query tokens of one request in any batch.
        graphs: (phase, ``captured``, ``eager`` or ``none``) for each phase that occurs.
        cascade: execution of a prefix shared by all requests: ``captured`` in graphs, ``eager``, or ``none`` without
            cascade.
        cascade_refusal: the reason why a backend with cascade does not use it for these layers.
        kv_scales: of an eight-bit cache, ``checkpoint``, ``calculate`` or ``1``. Empty for other caches.
        cache_format: format of the layers' caches.
        approximate: how the backend approximates, "" for exact attention.
        workspace: bytes that the backend declares beside the caches.
        edges: computations at the edges of attention that the model may leave to the backend.
        kept_edges: the reasons why the model keeps others.
        fast_prefill: True if the layers, which all read other layers' caches, run only for the tokens whose logits are
            wanted, in steps without a graph.
        last_queries: True if the model may skip the queries of the other tokens in the last layer, in steps without a
            graph. All keys and values are stored, and the backend gets a second plan.
        reason: the reason for this backend.
        rejected: the other candidates, in their order.
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
    cache_format: str = PLAIN
    approximate: str = ""
    workspace: int = 0
    edges: tuple[str, ...] = ()
    kept_edges: tuple[Reason, ...] = ()
    fast_prefill: bool = False
    last_queries: bool = False
    reason: str = ""
    rejected: tuple[Rejection, ...] = ()

    def captured(self, phase: str) -> bool:
        """Return True if the group's attention is inside the graph of a phase."""
        return dict(self.graphs).get(phase) == CAPTURED

    def decision(self) -> dict[str, Any]:
        """Return the decision without its reasons."""
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
            **({"cache_format": self.cache_format} if self.cache_format != PLAIN else {}),
            **({"approximate": self.approximate} if self.approximate else {}),
            **({"workspace": self.workspace} if self.workspace else {}),
            **({"edges": list(self.edges)} if self.edges else {}),
            **({"fast_prefill": True} if self.fast_prefill else {}),
            **({"last_queries": True} if self.last_queries else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        refused: dict[str, Any] = {"cascade_refusal": self.cascade_refusal} if self.cascade_refusal else {}
        if self.kept_edges:
            refused["kept_edges"] = [reason.to_json() for reason in self.kept_edges]
        return {
            **self.decision(),
            **refused,
            "reason": self.reason,
            "rejected": [item.to_json() for item in self.rejected],
        }


@frozen(kw_only=True)
class StateCachePlan:
    """State layers whose memory and checkpoints are managed by one cache spec.

    Attributes:
        kv_spec: the plugin, identified by `distribution`, `version` and `contract`.
        kinds: the layer kinds that it holds.
        inexact: the kinds that it does not declare as exact.
        layers: in model order. Their tensors have resolved dtypes.
        reason: the reason for this spec.
        rejected: the other specs.
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
        """Return the record as JSON types."""
        return {**self.decision(), "reason": self.reason, "rejected": [item.to_json() for item in self.rejected]}


@frozen(kw_only=True)
class StateGroupPlan:
    """State layers of one kind and their backend. Each request has one slot of state in every layer.

    Attributes:
        name: the group's name.
        layers: in model order. Their tensors have resolved dtypes.
        backend: the plugin, identified by `distribution`, `version`, `contract` and `inline`.
        dtype, state_dtype: names, of activations and of recurrent states.
        max_query_len: most tokens of one request in a batch.
        graphs: (phase, ``captured``, ``eager`` or ``none``) for each phase that occurs.
        rollback_copy: True if the backend allocates a second copy of the rows' states, to go back to accepted drafts.
        reason: the reason for this backend.
        rejected: the other candidates, in their order.
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
        """Return True if the group's layers are inside the graph of a phase."""
        return dict(self.graphs).get(phase) == CAPTURED

    def decision(self) -> dict[str, Any]:
        """Return the decision without its reasons."""
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
        """Return the record as JSON types."""
        return {**self.decision(), "reason": self.reason, "rejected": [item.to_json() for item in self.rejected]}
