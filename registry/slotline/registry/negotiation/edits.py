"""Settings that a user could change, as text and as the resulting request, so that advice is tested first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve

from slotline.registry.negotiation.request import AUTO, Asked, PlanRequest
from slotline.registry.negotiation.search import Solution

Edit = tuple[str, PlanRequest]
"""What to write into the file, and the request as it would be then."""

_WHAT_IF = "what if"


def edits_for(request: PlanRequest, key: str, solution: Solution) -> Iterator[Edit]:
    """Yield settings that give up one need, taken from a solution that was found without it, best first."""
    if key.startswith("attention.backend"):
        yield from _backend_edits(request, key, solution)
    elif key.startswith("cache.kv_spec."):
        kind = key.rsplit(".", 1)[1]
        yield kv_spec_edit(request, kind, solution.specs[kind].name)
    elif key.startswith("need."):
        kept = tuple(need for need in request.needs if need.capability != key.removeprefix("need."))
        yield f"do without what needs {key.removeprefix('need.')}", evolve(request, needs=kept)
    elif key == "cache.calculate_kv_scales":
        yield f"{key} = false", evolve(request, kv_scales=Asked(""))
    elif key == "drafter.tokens":
        yield from _draft_edits(request, solution)
    else:
        yield from _value_edits(request, key, solution)


def _backend_edits(request: PlanRequest, key: str, solution: Solution) -> Iterator[Edit]:
    kinds = [group.kv_kind for group in request.groups]
    chosen = {kind: solution.offer(index).candidate.name for index, kind in enumerate(kinds)}
    if key != "attention.backend":
        kind = key.removeprefix("attention.backend.")
        chosen = {kind: chosen[kind]}
    yield backend_edit(request, chosen)
    yield backend_edit(request, dict.fromkeys(chosen, AUTO))


def backend_edit(request: PlanRequest, names: Mapping[str, str]) -> Edit:
    """Return an edit that names the backend of some kinds and keeps the request for the others."""
    kinds = tuple(dict.fromkeys(group.kv_kind for group in request.groups))
    table: dict[str, Any] = {kind: request.backend_for(kind).value or AUTO for kind in kinds}
    table.update(names)
    distinct = set(map(str, table.values()))
    value: Any = next(iter(table.values())) if len(distinct) == 1 else table
    shown = value if isinstance(value, str) else {kind: name for kind, name in table.items() if name != AUTO}
    return f"attention.backend = {toml(shown)}", evolve(request, backend=Asked(value, _WHAT_IF, True))


def kv_spec_edit(request: PlanRequest, kind: str, name: str) -> Edit:
    """Return an edit that names the spec of one kind."""
    specs = {**request.kv_specs, kind: Asked(name, _WHAT_IF, True)}
    return f"cache.kv_spec.{kind} = {toml(name)}", evolve(request, kv_specs=specs)


def _draft_edits(request: PlanRequest, solution: Solution) -> Iterator[Edit]:
    limits = [offer.candidate.capabilities.query_len.limit for part in solution.parts for offer in part.offers]
    length = min((limit for limit in limits if limit is not None), default=1)
    if 1 < length < request.query_len.value:
        yield f"drafter.tokens = {length - 1}", evolve(request, query_len=Asked(length, _WHAT_IF, True))
    yield 'drafter.name = ""', evolve(request, query_len=Asked(1))


def _value_edits(request: PlanRequest, key: str, solution: Solution) -> Iterator[Edit]:
    limits = [offer.candidate.capabilities.query_len.limit for part in solution.parts for offer in part.offers]
    length = min((limit for limit in limits if limit is not None), default=1)
    field, value = {
        "cache.block_size": ("block_size", solution.block_size),
        "attention.layout": ("layout", AUTO),
        "graphs.mode": ("graphs", AUTO),
        "cache.dtype": ("kv_dtype", solution.pair[1]),
        "dtype": ("dtype", solution.pair[0]),
        "scheduler.max_batched_tokens": ("max_query_len", length),
        "batch_invariant": ("batch_invariant", False),
        "drafter.tree": ("tree_mask", False),
        "attention.cascade": ("cascade", False),
        "attention.approximate": ("approximate", True),
        "cache.prefix_caching": ("prefix_caching", False),
    }[key]
    yield value_edit(request, key, field, value)


def value_edit(request: PlanRequest, key: str, field: str, value: Any) -> Edit:
    """Return an edit that sets one plain value. `field` is its name in the request."""
    changes: dict[str, Any] = {field: Asked(value, _WHAT_IF, value != AUTO)}
    return f"{key} = {toml(value)}", evolve(request, **changes)


def toml(value: Any) -> str:
    """Return a value as written in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
