"""Choice of the cache specs that hold a model's states: memory, slots and the rules of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from slotline.registry.contracts.state import StateLayer
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation.failure import Failure, GroupFailure
from slotline.registry.negotiation.groups import StateCachePlan, StateGroupPlan
from slotline.registry.negotiation.offers import not_asked_for, reason_of, usability
from slotline.registry.negotiation.reasons import Reason, Rejection
from slotline.registry.negotiation.request import Candidate, PlanRequest


def holds_states(candidate: Candidate) -> bool:
    """Return True if a usable cache spec holds states instead of blocks."""
    return not usability(candidate) and bool(candidate.capabilities.state.support)


def choose_state_caches(
    request: PlanRequest, specs: Sequence[Candidate], groups: Sequence[StateGroupPlan]
) -> tuple[StateCachePlan, ...]:
    """Return the cache spec of each kind of state layers, one plan for all kinds that a spec holds.

    Args:
        request: the request. Its `kv_specs` may name a spec for a kind of state.
        specs: all cache specs. Those that hold blocks appear in the record only where they were named.
        groups: the state groups with resolved dtypes.

    Raises:
        NegotiationError: naming the kinds that no spec holds.
    """
    layers = sorted((layer for group in groups for layer in group.layers), key=lambda layer: layer.index)
    kinds = tuple(dict.fromkeys(layer.state_kind for layer in layers))
    chosen: dict[str, Candidate] = {}
    for kind in kinds:
        fits = [spec for spec in specs if not _reasons(request, kind, spec)]
        if not fits:
            raise _unheld(request, kind, specs, layers)
        chosen[kind] = min(fits, key=lambda spec: _order(kind, spec))
    return tuple(
        _plan(request, specs, spec, tuple(kind for kind in kinds if chosen[kind] is spec), layers)
        for spec in dict.fromkeys(chosen.values())
    )


def _plan(
    request: PlanRequest,
    specs: Sequence[Candidate],
    spec: Candidate,
    kinds: tuple[str, ...],
    layers: Sequence[StateLayer],
) -> StateCachePlan:
    others = [other for other in specs if other is not spec and _is_shown(request, kinds, other)]
    return StateCachePlan(
        kv_spec=spec.name,
        distribution=spec.distribution,
        version=spec.version,
        contract=spec.contract or 1,
        kinds=kinds,
        inexact=tuple(kind for kind in kinds if not _is_exact(spec, kind)),
        layers=tuple(layer for layer in layers if layer.state_kind in kinds),
        reason=_why_chosen(request, kinds, spec, others),
        rejected=tuple(_rejection(other, _why_not(request, kinds, spec, other)) for other in others),
    )


def _why_chosen(request: PlanRequest, kinds: tuple[str, ...], spec: Candidate, others: Sequence[Candidate]) -> str:
    named = [kind for kind in kinds if kind in request.kv_specs]
    if named:
        return f"named in {request.kv_specs[named[0]].origin}"
    if not any(not _reasons(request, kind, other) for other in others for kind in kinds):
        return "the only one that fits"
    return "exact for its layers" if all(_is_exact(spec, kind) for kind in kinds) else "the best of those that fit"


def _why_not(request: PlanRequest, kinds: tuple[str, ...], chosen: Candidate, other: Candidate) -> tuple[Reason, ...]:
    own = (_reasons(request, kind, other) or (_why_lost(kind, chosen, other),) for kind in kinds)
    return tuple(dict.fromkeys(reason for reasons in own for reason in reasons))


def _why_lost(kind: str, chosen: Candidate, other: Candidate) -> Reason:
    theirs, ours = other.capabilities.priority, chosen.capabilities.priority
    if _is_exact(chosen, kind) and not _is_exact(other, kind):
        text = f"cache spec: {other.name} is not exact for {kind} layers, {chosen.name} is"
    elif theirs != ours:
        text = f"priority: {theirs}, {chosen.name} has {ours}"
    else:
        text = f"name: equal in all that counts, and {chosen.name} comes first by name"
    return Reason(code="N191", text=text)


def _reasons(request: PlanRequest, kind: str, spec: Candidate) -> tuple[Reason, ...]:
    """Return the reasons why a spec cannot hold the states of a kind, empty if it may be chosen."""
    unusable = usability(spec)
    asked = request.kv_specs.get(kind)
    other = asked is not None and asked.value != spec.name
    choice = (not_asked_for((asked.value,), asked.origin),) if asked is not None and other else ()
    if unusable:
        return (*unusable, *choice)
    origin = f"model: {kind} layers"
    if not spec.capabilities.state.support:
        return (*choice, reason_of("kv_kinds", f"needs {kind}, and it holds blocks, not states", origin))
    text = spec.capabilities.kv_kinds.refusal(kind)
    refused = () if text is None else (reason_of("kv_kinds", text, origin),)
    sharing = request.prefix_caching
    text = spec.capabilities.prefix_caching.refusal(True) if sharing.value and sharing.explicit else None
    unshared = () if text is None else (reason_of("prefix_caching", text, sharing.origin),)
    return (*choice, *refused, *unshared)


def _is_shown(request: PlanRequest, kinds: tuple[str, ...], spec: Candidate) -> bool:
    """Return True for specs in the record: specs of states, named specs, and specs that failed to load."""
    named = any(asked.value == spec.name for kind, asked in request.kv_specs.items() if kind in kinds)
    return named or holds_states(spec)


def _is_exact(spec: Candidate, kind: str) -> bool:
    return spec.capabilities.exact_kinds.refusal(kind) is None


def _order(kind: str, spec: Candidate) -> tuple[bool, int, str]:
    return (not _is_exact(spec, kind), -spec.capabilities.priority, spec.name)


def _rejection(spec: Candidate, reasons: tuple[Reason, ...]) -> Rejection:
    return Rejection(name=spec.name, distribution=spec.distribution, version=spec.version, reasons=reasons)


def _unheld(
    request: PlanRequest, kind: str, specs: Sequence[Candidate], layers: Sequence[StateLayer]
) -> NegotiationError:
    rejected = tuple(_rejection(spec, _reasons(request, kind, spec)) for spec in specs)
    count = sum(layer.state_kind == kind for layer in layers)
    group = GroupFailure(name=kind, kind="kv_spec", layers=count, rejected=rejected)
    message = f"no cache spec holds the states of {count} layers of kind {kind}"
    asked = request.kv_specs.get(kind)
    fix = f"remove cache.kv_spec.{kind}" if asked is not None else f"install a kv_spec plugin for {kind} states"
    failure = Failure(code="N502" if asked is None else "N500", message=message, groups=(group,), remedies=(fix,))
    return NegotiationError(f"{failure.code} {message}", fix=fix, failure=failure)
