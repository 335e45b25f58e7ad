"""Input of negotiation: values with their origin, attention groups, and candidates."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from attrs import field, frozen

from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES, FP8_TOKEN_HEAD, INT4_ROTATED, INT8_TOKEN_HEAD
from slotline.registry.contracts.model_family import Stage
from slotline.registry.contracts.state import StateLayer
from slotline.registry.descriptor import Descriptor, DeviceInfo
from slotline.registry.negotiation.measured import Measured

T = TypeVar("T")

AUTO = "auto"
AUTO_GRAPHS = "full_and_piecewise"
"""The graph mode that `auto` aims at where nothing was measured."""
DEFAULT_BLOCK_SIZE = 16
"""Tokens in a block of the pool when nobody asks for another size."""
CACHE_DTYPES: Mapping[str, str] = MappingProxyType(
    {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
)
"""Short names of cache dtypes, as vLLM has them."""
CACHE_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in FORMAT_DTYPES},
        "int8": INT8_TOKEN_HEAD,
        "int8_per_token_head": INT8_TOKEN_HEAD,
        "fp8_per_token_head": FP8_TOKEN_HEAD,
        "int4": INT4_ROTATED,
    }
)
"""Values of `cache.dtype` that ask for a format with scales of its own; those with `per_token_head` are vLLM's."""
EIGHT_BIT = frozenset(CACHE_DTYPES.values())
"""Cache dtypes that are kept with scales."""


@frozen
class Asked(Generic[T]):
    """Requested value with its origin.

    Attributes:
        value: the value.
        origin: the origin in words: ``run.toml:12 attention.backend``, ``drafter ngram: 1+4 tokens``, ``default``.
        explicit: True if a user or a plugin set it. An explicit value is used or refused, never changed.
    """

    value: T
    origin: str = "default"
    explicit: bool = False


@frozen(kw_only=True)
class Need:
    """Additional need of a part of the engine towards attention backends, e.g. ``lse`` to merge partial results.

    Attributes:
        capability: attribute of `AttentionCapabilities` that must cover it.
        value: the need, in the terms of that capability's class.
        origin: the origin of the need.
        group: name of the attention group that it concerns, None for all.
    """

    capability: str
    value: Any = True
    origin: str = "default"
    group: str | None = None


@frozen(kw_only=True)
class GroupRequest:
    """Layers whose attention needs are equal, so that one backend instance can serve them.

    Attributes:
        name: the cache kind, with ``_1``, ``_2`` if several groups have the same kind.
        layers: in model order, at least one.
        fast_prefill: True if their batches contain only the tokens whose logits are wanted.
        last_queries: True if the model may skip the queries of the other tokens in the last layer.
    """

    name: str
    layers: tuple[AttentionLayer, ...]
    fast_prefill: bool = False
    last_queries: bool = False

    @property
    def layer(self) -> AttentionLayer:
        """First layer. The others are equal in everything that negotiation reads."""
        return self.layers[0]

    @property
    def kv_kind(self) -> str:
        """Cache kind of the layers."""
        return self.layer.kv_kind

    @property
    def has_cache(self) -> bool:
        """False for encoder-only layers, which keep nothing between steps."""
        return self.layer.attention_type != "encoder_only"


@frozen(kw_only=True)
class StateGroupRequest:
    """State layers of one kind with equal facts, so that one backend instance can serve them. At least one layer."""

    name: str
    layers: tuple[StateLayer, ...]

    @property
    def state_kind(self) -> str:
        """Kind of the state layers."""
        return self.layers[0].state_kind


@frozen(kw_only=True)
class Part:
    """Plugin chosen elsewhere that the plan records: a drafter, a logits processor, a model family, LoRA."""

    kind: str
    name: str
    distribution: str = ""
    version: str = ""
    contract: int = 1
    origin: str = "default"


@frozen(kw_only=True)
class Setting:
    """Requested and resolved value of one key."""

    key: str
    asked: str
    resolved: str
    origin: str = "default"
    explicit: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {"key": self.key, "asked": self.asked, "resolved": self.resolved, "origin": self.origin}


@frozen(kw_only=True)
class Candidate:
    """Plugin that might be chosen, after discovery and probe.

    Attributes:
        name: the plugin's name, taken from the descriptor by default.
        descriptor: None if the plugin could not be loaded.
        distribution, version: the plugin's source, ``inline`` for a plugin from a file.
        contract: the bound contract version, None if host and plugin have none in common (see `contract_error`).
        capabilities: the offer after the probe, None if there is none.
        probe_refusal: the probe's reason why the plugin cannot run on this device.
        load_error: the first line of the error that loading it raised.
        blocked: the rule that prevents it from loading.
        inline: True if it comes from a file instead of an installed distribution.
    """

    descriptor: Descriptor[Any] | None = None
    name: str = field()
    distribution: str = ""
    version: str = ""
    contract: int | None = 1
    contract_error: str | None = None
    capabilities: Any = field()
    probe_refusal: str | None = None
    load_error: str | None = None
    blocked: str | None = None
    inline: bool = False

    @property
    def installed(self) -> bool:
        """True if a plugin of that name was found, even if it is broken or blocked."""
        troubles = (self.blocked, self.load_error, self.probe_refusal)
        return self.capabilities is not None or self.contract is None or any(text is not None for text in troubles)

    @name.default
    def _descriptor_name(self) -> str:
        return "" if self.descriptor is None else self.descriptor.name

    @capabilities.default
    def _descriptor_capabilities(self) -> Any:
        return None if self.descriptor is None else self.descriptor.capabilities


@frozen(kw_only=True)
class PlanRequest:
    """Input of negotiation. It is never modified.

    Attributes:
        device: the device.
        groups: attention groups, from `group_layers`.
        state_groups: groups of state layers, from `group_states`.
        state_backend: like `backend`, with state kinds instead of cache kinds.
        dtype: dtype of weights and activations. `dtype_fallbacks` are tried in order if it is not explicit.
        kv_dtype: requested dtype of the cache. ``auto`` follows dtype. `cache_dtype` is its full name.
        kv_scales: source of the scales of an eight-bit cache, ``checkpoint`` or ``calculate``. Empty if all are 1.
        backend: ``auto``, a name, names in order of preference (``auto`` among them admits the rest), or a mapping from
            cache kind to any of these.
        block_size: tokens of a manager block. ``auto`` starts from `default_block_size` and follows the backends'
            preference, except if `timed_block_size` is set, which is the block size of the fastest run.
        layout: physical order inside a page: ``auto``, ``NHD``, ``HND``.
        kv_specs: layer kind -> the plugin that must hold it.
        graphs: the graph mode. ``auto`` aims at `auto_graphs`.
        uncaptured: the reason why no forward pass of this model can be captured with any backend, or "".
        query_len: most query tokens of a uniform decode batch, 1 + draft tokens.
        max_query_len: most query tokens of one request in a mixed batch.
        batch_invariant, tree_mask: features that backends must have.
        cascade: use of cascade for common prefixes: True requires it of backends, ``auto`` uses it if they support it.
        approximate: True if backends that approximate may be chosen though nobody names them.
        prefix_caching: True to share blocks between requests.
        needs: more needs, from plugins.
        strict: True to make each downgrade an error. `allow` lists the allowed codes.
        parts: plugins chosen elsewhere, for the record.
        settings: resolved elsewhere, for the record.
        facts: facts of the model shown in the plan, in order: name -> value.
        measured: measurements of this model on this device, None without any.
        stages: stages of the pipeline, for the record. Empty for one device.
    """

    device: DeviceInfo
    groups: tuple[GroupRequest, ...]
    dtype: Asked[str] = Asked("float32")
    dtype_fallbacks: tuple[str, ...] = ()
    kv_dtype: Asked[str] = Asked(AUTO)
    kv_scales: Asked[str] = Asked("")
    backend: Asked[Any] = Asked(AUTO)
    block_size: Asked[int | str] = Asked(AUTO)
    default_block_size: int = DEFAULT_BLOCK_SIZE
    timed_block_size: bool = False
    layout: Asked[str] = Asked(AUTO)
    kv_specs: Mapping[str, Asked[str]] = field(factory=dict)
    graphs: Asked[str] = Asked(AUTO)
    auto_graphs: str = AUTO_GRAPHS
    uncaptured: str = ""
    query_len: Asked[int] = Asked(1)
    max_query_len: Asked[int] = Asked(1)
    batch_invariant: Asked[bool] = Asked(False)
    tree_mask: Asked[bool] = Asked(False)
    cascade: Asked[bool | str] = Asked(False)
    approximate: Asked[bool] = Asked(False)
    prefix_caching: Asked[bool] = Asked(True)
    needs: tuple[Need, ...] = ()
    strict: bool = False
    allow: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    settings: tuple[Setting, ...] = ()
    facts: Mapping[str, Any] = field(factory=dict)
    measured: Measured | None = None
    stages: tuple[Stage, ...] = ()
    state_groups: tuple[StateGroupRequest, ...] = ()
    state_backend: Asked[Any] = Asked(AUTO)

    @property
    def cache_dtype(self) -> str:
        """Full name of the cache's dtype, or ``auto``."""
        if self.cache_format:
            return FORMAT_DTYPES[self.cache_format]
        return CACHE_DTYPES.get(self.kv_dtype.value, self.kv_dtype.value)

    @property
    def cache_format(self) -> str:
        """Cache format that the requested dtype stands for, "" if it is only a dtype."""
        return CACHE_FORMATS.get(self.kv_dtype.value, "")

    def backend_for(self, kv_kind: str) -> Asked[tuple[str, ...]]:
        """Return the names requested for layers of one kind, best first. Empty for any backend."""
        return _names_for(self.backend, kv_kind)

    def state_backend_for(self, state_kind: str) -> Asked[tuple[str, ...]]:
        """Return the names requested for state layers of one kind, best first. Empty for any backend."""
        return _names_for(self.state_backend, state_kind)


def _names_for(asked: Asked[Any], kind: str) -> Asked[tuple[str, ...]]:
    value, key = asked.value, ""
    if isinstance(value, Mapping):
        key = f".{kind}"
        value = value.get(kind, AUTO)
    names = (value,) if isinstance(value, str) else tuple(value)
    if names == (AUTO,):
        return Asked((), "default")
    return Asked(names, asked.origin + key, asked.explicit)


def group_layers(
    layers: Sequence[AttentionLayer], fast_prefill: Container[int] = (), last_queries: int | None = None
) -> tuple[GroupRequest, ...]:
    """Group layers with equal needs, named after their cache kind, in the order of their first layer.

    The scale counts as a need too, because a backend may use it in its host-side plan of a step. Layers whose index is
    in `fast_prefill` have batches of their own and form separate groups. `last_queries` is the index of the layer that
    may skip queries, which its group records. Layers that use the picks of others count as having their inputs.
    """
    members: dict[tuple[object, ...], list[AttentionLayer]] = {}
    inputs = {layer.index: layer.inputs for layer in layers}
    for layer in layers:
        given = inputs[layer.index if layer.index_from is None else layer.index_from]
        members.setdefault((layer.index in fast_prefill, *_needs_of(layer), given), []).append(layer)
    seen: dict[str, int] = {}
    groups = []
    for (apart, *_), own in members.items():
        kind = own[0].kv_kind
        number = seen.get(kind, 0)
        seen[kind] = number + 1
        name = kind if number == 0 else f"{kind}_{number}"
        last = any(layer.index == last_queries for layer in own)
        groups.append(GroupRequest(name=name, layers=tuple(own), fast_prefill=bool(apart), last_queries=last))
    return tuple(groups)


def _needs_of(layer: AttentionLayer) -> tuple[object, ...]:
    shape = (layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v, layer.scale)
    biases = (layer.alibi_slopes, layer.position_bias)
    features = (layer.window, layer.chunk, layer.soft_cap, layer.sinks, *biases, layer.mla, layer.keys_ahead)
    return (layer.kv_kind, layer.attention_type, shape, *features, layer.index_topk)
