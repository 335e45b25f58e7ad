"""Needs of each group, one by one, so that every refusal names its origin and every need can be given up separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attrs import evolve, frozen

from slotline.registry.capability import Set
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES, PLAIN
from slotline.registry.hooks import Ranking
from slotline.registry.negotiation.request import AUTO, EIGHT_BIT, Asked, Candidate, GroupRequest, PlanRequest

_OF_FORMATS = frozenset(FORMAT_DTYPES.values()) - EIGHT_BIT
"""Cache dtypes that only formats with their own scales have."""

Pair = tuple[str, str]
"""(dtype, cache dtype)."""

Ranker = Callable[[str, str, tuple[str, ...]], Ranking | None]
"""Called with kind, group and the names of the candidates that fit; returns an order of them or None."""


def no_ranking(kind: str, group: str, candidates: tuple[str, ...]) -> Ranking | None:
    """Keep the order of candidates."""
    return None


@frozen(kw_only=True)
class Problem:
    """Request with its candidates. `waived` holds the keys of needs that may be ignored."""

    request: PlanRequest
    attention: tuple[Candidate, ...]
    kv_specs: tuple[Candidate, ...]
    waived: frozenset[str] = frozenset()
    rank: Ranker = no_ranking

    def insists(self, key: str) -> bool:
        """Return True if the need of this key is not waived."""
        return key not in self.waived

    def without(self, *keys: str) -> Problem:
        """Return the same problem with these needs given up."""
        return evolve(self, waived=self.waived | frozenset(keys))

    def candidates_for(self, group: GroupRequest) -> tuple[Candidate, ...]:
        """Return the backends that take part in a group. Unknown names take part only in groups that request them."""
        named = self.request.backend_for(group.kv_kind).value
        return tuple(item for item in self.attention if item.installed or item.name in named)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Cache kinds of the model, in the order of its groups."""
        return tuple(dict.fromkeys(group.kv_kind for group in self.request.groups if group.has_cache))


@frozen(kw_only=True)
class GroupNeed:
    """Need of one group for one capability.

    Attributes:
        key: the configuration key, or ``model.<capability>[<group>]``, or ``device``.
        capability: the attribute that must cover `value`.
        origin: the origin of the need.
        inherent: True if no setting can remove it.
    """

    key: str
    capability: str
    value: Any
    origin: str
    inherent: bool = False

    def active(self) -> bool:
        """Return True if the need demands anything. A feature that is not wanted demands nothing."""
        return self.value is not False and self.value is not None


def group_needs(problem: Problem, group: GroupRequest, pair: Pair) -> tuple[GroupNeed, ...]:
    """Return the needs of a group that concern one candidate by itself.

    Blocks, layout and graphs are decided jointly.
    """
    needs = (*_device_needs(problem), *_model_needs(group), *_asked_needs(problem.request, group, pair))
    needs = (*needs, *_format_needs(problem, group))
    exact, origin = not problem.request.approximate.value, problem.request.approximate.origin
    needs = (*needs, GroupNeed(key="attention.approximate", capability="exact", value=exact, origin=origin))
    insisted = tuple(need for need in needs if need.active() and problem.insists(need.key))
    return (_pair_need(problem.request, pair), *insisted)


def _device_needs(problem: Problem) -> Iterator[GroupNeed]:
    device = problem.request.device
    origin = f"device {device.name or device.type}"
    yield GroupNeed(key="device", capability="devices", value=device.need, origin=origin, inherent=True)
    if device.compute_capability is not None:
        yield GroupNeed(
            key="device",
            capability="min_compute_capability",
            value=device.compute_capability,
            origin=origin,
            inherent=True,
        )


def _model_needs(group: GroupRequest) -> Iterator[GroupNeed]:
    layer = group.layer
    sizes = {"head_sizes": layer.head_size, "different_value_head": layer.head_size_v != layer.head_size}
    facts = {
        "attention_types": layer.attention_type,
        **({"mla": True, "latent_sizes": layer.head_size} if layer.mla else sizes),
        "group_sizes": layer.num_heads // max(layer.num_kv_heads, 1),
        "sliding_window": layer.window is not None and layer.attention_type != "encoder_only",
        "encoder_window": layer.window is not None and layer.attention_type == "encoder_only",
        "chunked": layer.chunk is not None,
        "soft_cap": layer.soft_cap is not None,
        "sinks": layer.sinks,
        "alibi": layer.alibi_slopes is not None,
        "keys_ahead": layer.keys_ahead,
        "position_bias": layer.position_bias is not None,
        "index_topk": layer.index_topk is not None,
    }
    inputs = (("layer_inputs", each.name) for each in layer.inputs)
    for capability, value in (*facts.items(), *inputs):
        origin = f"model: {group.name} layers"
        if capability == "keys_ahead":  # a drafter's layers may be the only ones
            origin += f", {layer.name}"
        key = model_key(capability, group.name)
        yield GroupNeed(key=key, capability=capability, value=value, origin=origin, inherent=True)


def model_key(capability: str, name: str) -> str:
    """Return the key of a need that comes from the model."""
    return f"model.{capability}[{name}]"


def _pair_need(request: PlanRequest, pair: Pair) -> GroupNeed:
    """Return the need for a dtype pair.

    Giving `dtype` up means that other pairs are tried, not that none is checked.
    """
    kv_origin = f", {request.kv_dtype.origin}" if request.kv_dtype.explicit else ""
    return GroupNeed(key="dtype", capability="dtypes", value=pair, origin=request.dtype.origin + kv_origin)


def _asked_needs(request: PlanRequest, group: GroupRequest, pair: Pair) -> Iterator[GroupNeed]:
    for key, capability, asked in (
        ("drafter.tokens", "query_len", request.query_len),
        ("scheduler.max_batched_tokens", "query_len", request.max_query_len),
        ("batch_invariant", "batch_invariant", request.batch_invariant),
        ("drafter.tree", "tree_mask", request.tree_mask),
    ):
        yield GroupNeed(key=key, capability=capability, value=asked.value, origin=asked.origin)
    must = request.cascade.value is True and sees_all(group)
    yield GroupNeed(key="attention.cascade", capability="cascade", value=must, origin=request.cascade.origin)
    scaled = bool(request.kv_scales.value) and pair[1] in EIGHT_BIT and group.has_cache and not request.cache_format
    yield GroupNeed(key=scales_key(request), capability="kv_scales", value=scaled, origin=request.kv_scales.origin)
    for need in request.needs:
        if need.group in (None, group.name):
            key = f"need.{need.capability}"
            yield GroupNeed(key=key, capability=need.capability, value=need.value, origin=need.origin)


def _format_needs(problem: Problem, group: GroupRequest) -> Iterator[GroupNeed]:
    if group.has_cache:
        cache_format, origin = cache_format_of(problem, group.kv_kind)
        yield GroupNeed(key="cache.format", capability="cache_formats", value=cache_format, origin=origin)


def cache_format_of(problem: Problem, kind: str) -> tuple[str, str]:
    """Return the format of the caches of layers of one kind, and its origin.

    It is the one that `cache.dtype` stands for. Without one it is ``plain`` if a spec that may hold the layers offers
    that, or else the first format that such a spec offers. If the configuration names backends of which none reads
    ``plain``, it is the first format that one of them and such a spec have in common.
    """
    request = problem.request
    if request.cache_format and problem.insists("cache.dtype"):
        return request.cache_format, request.kv_dtype.origin
    asked = request.kv_specs.get(kind)
    offers = [
        (item.name, item.capabilities.formats)
        for item in problem.kv_specs
        if item.capabilities is not None
        and not item.capabilities.state.support
        and item.capabilities.kv_kinds.refusal(kind) is None
        and (asked is None or asked.value == item.name or not problem.insists(f"cache.kv_spec.{kind}"))
    ]
    if shared := _format_of_backends(problem, kind, [offer for _, offer in offers]):
        return shared, request.backend_for(kind).origin
    if offers and all(offer.refusal(PLAIN) is not None for _, offer in offers):
        own = [(min(values), name) for name, offer in offers if (values := offer.values - FORMAT_DTYPES.keys())]
        if own:
            return min(own)[0], f"kv_spec {min(own)[1]}" if asked is None else asked.origin
    return PLAIN, "default cache.dtype"


def _format_of_backends(problem: Problem, kind: str, specs: Sequence[Set[str]]) -> str | None:
    """Return the format of the backends that are named for a kind of layers, if they do not read ``plain``."""
    names = problem.request.backend_for(kind).value
    if not names or not problem.insists(backend_key(problem.request, kind)):
        return None
    named = [each.capabilities.cache_formats for each in problem.attention if each.name in names and each.capabilities]
    if AUTO in names or not named or any(offer.refusal(PLAIN) is None for offer in named):
        return None
    return min(
        (
            value
            for offer in named
            for value in offer.values or ()
            for spec in specs
            if spec.refusal(value) is None and value not in FORMAT_DTYPES
        ),
        default=None,
    )


def sees_all(group: GroupRequest) -> bool:
    """Return True if all later tokens of a request see the whole prefix that requests share."""
    return group.layer.window is None and group.layer.chunk is None and group.layer.attention_type == "decoder"


def scales_key(request: PlanRequest) -> str:
    """Return the setting that makes scales necessary."""
    return "cache.calculate_kv_scales" if request.kv_scales.value == "calculate" else "cache.dtype"


def conditions(needs: Sequence[GroupNeed], query_len: int, pair: Pair) -> frozenset[str]:
    """Return the names under which a `Limit` applies.

    These are each needed feature, ``name=value`` for each need, and ``speculation`` and ``kv_dtype`` if they are used.
    ``graphs`` is checked phase by phase instead.
    """
    names = {need.capability for need in needs if need.value is True}
    names |= {f"{need.capability}={need.value}" for need in needs}
    if query_len > 1:
        names.add("speculation")
    if pair[0] != pair[1]:
        names.add("kv_dtype")
    return frozenset(names)


def dtype_pairs(problem: Problem) -> tuple[Pair, ...]:
    """Return the pairs to try, best first: the requested pair, then fallbacks if the dtype was left open."""
    request = problem.request
    dtypes = (request.dtype.value, *(() if request.dtype.explicit else request.dtype_fallbacks))
    cache = request.cache_dtype
    own = cache == AUTO or bool(request.cache_format and not problem.insists("cache.dtype"))
    asked = [(dtype, dtype if own else cache) for dtype in dtypes]
    return tuple(dict.fromkeys([*asked, *_pairs_once_waived(problem, dtypes)]))


def _pairs_once_waived(problem: Problem, dtypes: tuple[str, ...]) -> list[Pair]:
    free_dtype, free_cache = not problem.insists("dtype"), not problem.insists("cache.dtype")
    cache = problem.request.cache_dtype
    if not (free_dtype or free_cache):
        return []
    return [
        pair
        for pair in _offered_pairs(problem.attention)
        if (pair[1] not in _OF_FORMATS or (pair[1] == cache and not free_cache))
        and (free_dtype or pair[0] in dtypes)
        and (free_cache or pair[1] == (pair[0] if cache == AUTO else cache))
    ]


def _offered_pairs(candidates: Sequence[Candidate]) -> list[Pair]:
    offers = [candidate.capabilities.dtypes.values for candidate in candidates if candidate.capabilities is not None]
    return sorted({pair for values in offers if values is not None for pair in values})


def backend_key(request: PlanRequest, kv_kind: str) -> str:
    """Return the key that names the backend of a kind: the common one, or the kind's own key in a table."""
    own = not isinstance(request.backend.value, str | tuple | list)
    return f"attention.backend.{kv_kind}" if own else "attention.backend"


def asked_keys(problem: Problem) -> dict[str, Asked[Any]]:
    """Return the needs that a setting could remove, by key, in reading order."""
    request = problem.request
    found: dict[str, Asked[Any]] = {}
    for group in request.groups:
        names = request.backend_for(group.kv_kind)
        if names.value:
            found[backend_key(request, group.kv_kind)] = names
    single: dict[str, tuple[Asked[Any], bool]] = {
        "cache.block_size": (request.block_size, request.block_size.value != AUTO),
        "attention.layout": (request.layout, request.layout.value != AUTO),
        "graphs.mode": (request.graphs, request.graphs.value == "full"),
        "cache.dtype": (request.kv_dtype, request.kv_dtype.value != AUTO),
        "dtype": (request.dtype, True),
        "drafter.tokens": (request.query_len, request.query_len.value > 1),
        "scheduler.max_batched_tokens": (request.max_query_len, request.max_query_len.value > 1),
        "batch_invariant": (request.batch_invariant, request.batch_invariant.value),
        "drafter.tree": (request.tree_mask, request.tree_mask.value),
        "attention.cascade": (request.cascade, request.cascade.value is True),
        "attention.approximate": (request.approximate, _some_approximate(problem) and not request.approximate.value),
        "cache.calculate_kv_scales": (request.kv_scales, request.kv_scales.value == "calculate"),
        "cache.prefix_caching": (
            request.prefix_caching,
            request.prefix_caching.value and request.prefix_caching.explicit,
        ),
    }
    found.update({key: asked for key, (asked, in_play) in single.items() if in_play})
    found.update({f"cache.kv_spec.{kind}": asked for kind, asked in request.kv_specs.items() if kind in problem.kinds})
    for need in request.needs:
        found[f"need.{need.capability}"] = Asked(need.value, need.origin, True)
    return found


def _some_approximate(problem: Problem) -> bool:
    offers = (each.capabilities for each in problem.attention if each.capabilities is not None)
    return any(offer.exact.refusal(True) is not None for offer in offers)


def inherent_keys(problem: Problem) -> dict[str, Asked[Any]]:
    """Return the needs of model and device, by key."""
    found: dict[str, Asked[Any]] = {}
    pair = (problem.request.dtype.value, problem.request.cache_dtype)
    for group in problem.request.groups:
        for need in group_needs(problem, group, pair):
            if need.inherent:
                found.setdefault(need.key, Asked(need.value, need.origin, True))
    for kind in problem.kinds:
        found[model_key("kv_kind", kind)] = Asked(kind, f"model: {kind} layers", True)
    return found
