"""Preparation of a request and its candidates from a configuration, a model's facts and discovered plugins."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

from slotline.registry.config.load import LoadedConfig
from slotline.registry.contracts.model_family import ModelFacts
from slotline.registry.descriptor import HOST_CONTRACTS, Descriptor, DeviceInfo, Kind
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation.request import (
    AUTO,
    CACHE_DTYPES,
    EIGHT_BIT,
    Asked,
    Candidate,
    Need,
    Part,
    PlanRequest,
    Setting,
    group_layers,
)
from slotline.registry.negotiation.states import group_states
from slotline.registry.probing import probe
from slotline.registry.records import PluginRecord, PluginState


class Plugins(Protocol):
    """Methods of the plugin registry that are needed here."""

    def records(self) -> Sequence[PluginRecord]:
        """Return every row, by kind and name."""

    def load(self, kind: Kind, name: str, *, required: bool) -> Descriptor[Any] | None:
        """Return the descriptor of a plugin, or None if it is not required and does not load."""


def prepare_request(
    loaded: LoadedConfig,
    facts: ModelFacts,
    device: DeviceInfo,
    *,
    max_model_len: int,
    dtype_fallbacks: Sequence[str] = (),
    draft_tokens: int = 0,
    tree: bool = False,
    fast_prefill: Container[int] = (),
    last_queries: int | None = None,
    needs: Sequence[Need] = (),
    parts: Sequence[Part] = (),
    settings: Sequence[Setting] = (),
) -> PlanRequest:
    """Return the request of a configuration and a model on a device.

    Args:
        loaded: the configuration with the origin of each value.
        facts: facts of the model.
        device: the device.
        max_model_len: resolved longest sequence.
        dtype_fallbacks: if `dtype` is 'auto', the dtypes to try in order. Empty to try only the checkpoint's.
        draft_tokens: number of tokens that the drafter proposes in a step.
        tree: True if the drafter proposes a tree.
        fast_prefill: indices of the attention layers that run only for the tokens whose logits are wanted.
        last_queries: index of the layer that may skip the queries of the other tokens. None if all are needed.
        needs: needs of further plugins towards attention backends.
        parts: plugins chosen elsewhere, for the record.
        settings: resolved elsewhere, for the record.

    Raises:
        NegotiationError: if scales should be calculated for a cache without scales.
    """
    config, source = loaded.config, _Source(loaded)
    dtypes = (config.dtype,) if config.dtype != AUTO else tuple(dtype_fallbacks) or (facts.dtype,)
    longest = min(config.scheduler.max_batched_tokens, max_model_len)
    drafter = f"drafter {config.drafter.name}: 1+{draft_tokens} tokens"
    return PlanRequest(
        device=device,
        groups=group_layers(facts.layers, fast_prefill, last_queries),
        dtype=_dtype(source.asked("dtype", config.dtype), dtypes[0], facts, device),
        dtype_fallbacks=dtypes[1:],
        kv_dtype=source.asked("cache.dtype", config.cache.dtype),
        kv_scales=_kv_scales(source, facts),
        backend=source.asked("attention.backend", config.attention.backend),
        block_size=source.asked("cache.block_size", config.cache.block_size),
        layout=source.asked("attention.layout", config.attention.layout),
        kv_specs={
            kind: source.asked(f"cache.kv_spec.{kind}", name)
            for kind, name in config.cache.kv_spec.items()
            if name != AUTO
        },
        graphs=source.asked("graphs.mode", config.graphs.mode),
        query_len=Asked(1 + draft_tokens, drafter, True) if draft_tokens else Asked(1),
        max_query_len=source.asked("scheduler.max_batched_tokens", longest),
        tree_mask=Asked(tree, drafter, tree),
        batch_invariant=source.asked("batch_invariant", config.batch_invariant),
        cascade=source.asked("attention.cascade", config.attention.cascade),
        approximate=source.asked("attention.approximate", config.attention.approximate),
        prefix_caching=source.asked("cache.prefix_caching", config.cache.prefix_caching),
        needs=tuple(needs),
        strict=config.strict,
        allow=tuple(config.allow),
        parts=tuple(parts),
        settings=tuple(settings),
        facts=_facts(facts, max_model_len),
        state_groups=group_states(facts.state_layers),
        state_backend=source.asked("state.backend", config.state.backend),
    )


def attention_candidates(registry: Plugins, device: DeviceInfo) -> tuple[Candidate, ...]:
    """Return every known attention backend, probed on `device`. Broken and blocked ones have the reason."""
    return candidates(registry, Kind.ATTENTION, device)


def kv_spec_candidates(registry: Plugins, device: DeviceInfo) -> tuple[Candidate, ...]:
    """Return every known cache spec, probed on `device`. Broken and blocked ones have the reason."""
    return candidates(registry, Kind.KV_SPEC, device)


def state_candidates(registry: Plugins, device: DeviceInfo) -> tuple[Candidate, ...]:
    """Return every known state backend, probed on `device`. Broken and blocked ones have the reason."""
    return candidates(registry, Kind.STATE, device)


def candidates(registry: Plugins, kind: Kind, device: DeviceInfo) -> tuple[Candidate, ...]:
    """Return every plugin of a kind, in the order of the registry's rows."""
    names = dict.fromkeys(row.name for row in registry.records() if row.kind == kind)
    for name in names:
        registry.load(kind, name, required=False)  # loading updates the row's error
    rows = [row for row in registry.records() if row.kind == kind and row.state is not PluginState.SHADOWED]
    return tuple(_candidate(row, kind, device) for row in rows)


def _candidate(row: PluginRecord, kind: Kind, device: DeviceInfo) -> Candidate:
    common: dict[str, Any] = {"distribution": row.distribution, "version": row.version, "inline": row.inline}
    descriptor = row.descriptor
    if row.state is PluginState.BLOCKED:
        return Candidate(name=row.name, blocked=row.error or "blocked by the configuration", **common)
    if row.state is PluginState.INCOMPATIBLE:
        return Candidate(name=row.name, contract=None, contract_error=row.error, **common)
    if descriptor is None:
        return Candidate(name=row.name, load_error=row.error or "it did not load", **common)
    offer = probe(descriptor, device)
    refused = offer if isinstance(offer, str) else None
    return Candidate(
        descriptor=descriptor,
        contract=HOST_CONTRACTS[kind].common(descriptor.contract),
        capabilities=descriptor.capabilities if refused is not None else offer,
        probe_refusal=refused,
        **common,
    )


class _Source:
    """Lookup of origins by key."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.config = loaded.config
        self._origins = loaded.origins

    def asked(self, key: str, value: Any) -> Asked[Any]:
        """Return the value with its origin. A table has the origin of its first entry."""
        within = [origin for at, origin in self._origins.items() if at == key or at.startswith(f"{key}.")]
        origin = next((item for item in within if item.kind != "default"), None)
        if origin is None:
            return Asked(value, f"default {key}")
        if isinstance(value, Mapping):
            value = dict(value)
        return Asked(value, f"{origin.where} {key}", value != AUTO)


def _kv_scales(source: _Source, facts: ModelFacts) -> Asked[str]:
    """Return the source of the scales of an eight-bit cache. The request has priority over the checkpoint."""
    asked = source.asked("cache.calculate_kv_scales", source.config.cache.calculate_kv_scales)
    if asked.value:
        if source.config.cache.dtype not in EIGHT_BIT | CACHE_DTYPES.keys():
            raise NegotiationError(
                f"{asked.origin} = true: a cache of dtype {source.config.cache.dtype!r} has no scales",
                fix='set cache.dtype = "fp8", or remove cache.calculate_kv_scales',
            )
        return Asked("calculate", asked.origin, True)
    if any(scale != 1.0 for pair in facts.kv_scales.values() for scale in pair):
        return Asked("checkpoint", "checkpoint: scales of the cache", True)
    return Asked("")


def _dtype(asked: Asked[str], name: str, facts: ModelFacts, device: DeviceInfo) -> Asked[str]:
    if asked.explicit:
        return asked
    if name == facts.dtype:
        return Asked(name, f"checkpoint: {facts.dtype}")
    return Asked(name, f"checkpoint: {facts.dtype}; {device.type} computes in {name}")


def _facts(facts: ModelFacts, max_model_len: int) -> dict[str, Any]:
    found = {
        "architecture": facts.architecture,
        "parameters": facts.num_parameters,
        "layers": len(facts.layers),
        **({"state_layers": len(facts.state_layers)} if facts.state_layers else {}),
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "max_model_len": max_model_len,
    }
    if facts.modalities:
        found["modalities"] = ", ".join(modality.name for modality in facts.modalities)
    return found
