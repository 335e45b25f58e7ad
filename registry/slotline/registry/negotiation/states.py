"""Choice of the backend for each group of state layers. Groups are independent of each other, as nothing is shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import evolve, frozen

from slotline.registry.contracts.state import StateLayer
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import graphs
from slotline.registry.negotiation.codes import CODES
from slotline.registry.negotiation.edits import toml
from slotline.registry.negotiation.failure import Failure, GroupFailure
from slotline.registry.negotiation.groups import CAPTURED, NONE, GroupPlan, StateGroupPlan
from slotline.registry.negotiation.needs import Pair, Ranker, no_ranking
from slotline.registry.negotiation.offers import not_asked_for, usability
from slotline.registry.negotiation.parts import part_reasons
from slotline.registry.negotiation.plan import Plan
from slotline.registry.negotiation.reasons import Note, Reason, Rejection
from slotline.registry.negotiation.request import (
    AUTO,
    Asked,
    Candidate,
    Need,
    PlanRequest,
    Setting,
    StateGroupRequest,
)
from slotline.registry.negotiation.state_caches import choose_state_caches

STATE_DTYPE = "float32"
"""Of recurrent states: what is rounded in them stays wrong for the rest of a request."""


@frozen(kw_only=True)
class _Verdict:
    """Verdict on one candidate for one group: its reasons against it, and its order among usable candidates."""

    candidate: Candidate
    reasons: tuple[Reason, ...]
    rank: int = 0
    ranking: int = 0

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key. Smaller is better."""
        return (self.rank, self.ranking, -self.candidate.capabilities.priority, self.candidate.name)


def group_states(layers: Sequence[StateLayer]) -> tuple[StateGroupRequest, ...]:
    """Group layers of equal kind, facts and tensors, named after their kind, in the order of their first layer."""
    members: dict[tuple[object, ...], list[StateLayer]] = {}
    for layer in layers:
        members.setdefault((layer.state_kind, tuple(sorted(layer.facts.items())), layer.tensors), []).append(layer)
    seen: dict[str, int] = {}
    groups = []
    for own in members.values():
        kind = own[0].state_kind
        number = seen.get(kind, 0)
        seen[kind] = number + 1
        groups.append(StateGroupRequest(name=kind if number == 0 else f"{kind}_{number}", layers=tuple(own)))
    return tuple(groups)


def with_states(
    plan: Plan,
    request: PlanRequest,
    candidates: Sequence[Candidate],
    specs: Sequence[Candidate],
    rank: Ranker = no_ranking,
) -> Plan:
    """Return the plan with the backends and cache specs of the model's state layers, if it has any.

    Raises:
        NegotiationError: see `choose_states` and `choose_state_caches`.
    """
    if not request.state_groups:
        return plan
    groups = choose_states(request, candidates, plan.dtype, rank)
    names = {group.layers[0].state_kind: group.backend for group in groups}
    asked = request.state_backend
    setting = Setting(
        key="state.backend",
        asked=asked.value if isinstance(asked.value, str) else toml(asked.value),
        resolved=toml(names) if len(set(names.values())) > 1 else groups[0].backend,
        origin=asked.origin,
        explicit=asked.explicit,
    )
    caches = choose_state_caches(request, specs, groups)
    plan = evolve(plan, state_groups=groups, state_caches=caches, settings=(*plan.settings, setting))
    plan = _captured_as_far_as_states_allow(plan, request, candidates)
    return _shared_as_far_as_states_allow(plan, (*candidates, *specs))


def _shared_as_far_as_states_allow(plan: Plan, candidates: Sequence[Candidate]) -> Plan:
    """Return the plan, without prefix caching if a chosen state backend or spec takes no checkpoints."""
    if not plan.prefix_caching:
        return plan
    because = (
        *(
            f"{group.name} layers: {group.backend} makes no checkpoints of their states"
            for group in plan.state_groups
            if _offer(candidates, group.backend, "checkpoints").refusal(True) is not None
        ),
        *(
            f"{', '.join(cache.kinds)} layers: kv_spec {cache.kv_spec} takes no checkpoints"
            for cache in plan.state_caches
            if _offer(candidates, cache.kv_spec, "prefix_caching").refusal(True) is not None
        ),
    )
    if not because:
        return plan
    note = Note(
        code="N331",
        key="cache.prefix_caching",
        text="prefix caching is off",
        asked="true",
        resolved="false",
        because=because,
        to_avoid=("cache.prefix_caching = false",),
    )
    off = {"cache.prefix_caching", "attention.cascade"}  # no blocks are shared, so no step has a common prefix
    return evolve(
        plan,
        groups=tuple(evolve(group, cascade=NONE, cascade_refusal="") for group in plan.groups),
        settings=tuple(evolve(s, resolved="false") if s.key in off else s for s in plan.settings),
        downgrades=(*plan.downgrades, note),
    )


def _offer(candidates: Sequence[Candidate], name: str, capability: str) -> Any:
    """Return one capability of the candidate of that name that has it."""
    found = (getattr(item.capabilities, capability, None) for item in candidates if item.name == name)
    return next(offer for offer in found if offer is not None)


def _captured_as_far_as_states_allow(plan: Plan, request: PlanRequest, candidates: Sequence[Candidate]) -> Plan:
    """Return the plan with the graphs of all groups, and a downgrade if states break the intended graphs."""
    groups: tuple[GroupPlan | StateGroupPlan, ...] = (*plan.groups, *plan.state_groups)
    phases = {
        phase: graphs.phase_state([dict(group.graphs)[phase] for group in groups])
        for phase in graphs.phases_of(request.query_len.value)
    }
    resolved, mode = graphs.resolved_mode(phases), graphs.effective_mode(request)
    found = evolve(
        plan,
        graphs=evolve(plan.graphs, resolved=resolved, phases=tuple(phases.items())),
        settings=tuple(evolve(s, resolved=resolved) if s.key == "graphs.mode" else s for s in plan.settings),
    )
    by_name = {candidate.name: candidate for candidate in candidates}
    because = tuple(
        f"{group.name}, {phase}: {group.backend} {'; '.join(_uncaptured(request, phase, by_name[group.backend]))}"
        for group in plan.state_groups
        for phase, state in group.graphs
        if graphs.wanted(mode, phase) == graphs.FULL and state != CAPTURED
    )
    if not because:
        return found
    before = next((note for note in plan.downgrades if note.code == "N310"), None)
    note = Note(
        code="N310",
        key="graphs.mode",
        text=f"{mode} ({request.graphs.origin}) does not hold for every group; {resolved} over all",
        asked=request.graphs.value,
        resolved=resolved,
        because=(*(before.because if before else ()), *because),
        to_avoid=(f"graphs.mode = {toml(resolved)}",),
    )
    return evolve(found, downgrades=(*(n for n in plan.downgrades if n is not before), note))


def _graph_states(request: PlanRequest, candidate: Candidate) -> tuple[tuple[str, str], ...]:
    mode = graphs.effective_mode(request)
    return tuple(
        (phase, graphs.group_state(graphs.wanted(mode, phase), not _uncaptured(request, phase, candidate)))
        for phase in graphs.phases_of(request.query_len.value)
    )


def _uncaptured(request: PlanRequest, phase: str, candidate: Candidate) -> list[str]:
    """Return the reasons why a candidate's layers cannot be captured in a phase, empty if they can."""
    lens = {"decode": 1, "verify": request.query_len.value, "mixed": request.max_query_len.value}
    texts = [candidate.capabilities.graphs.refusal(graphs.required_level(phase))]
    texts += [
        limit.offer.refusal(lens[phase])
        for limit in candidate.capabilities.limits
        if limit.when == "graphs" and limit.capability == "query_len"
    ]
    return [text for text in texts if text]


def choose_states(
    request: PlanRequest, candidates: Sequence[Candidate], dtype: str, rank: Ranker = no_ranking
) -> tuple[StateGroupPlan, ...]:
    """Return the backend of each group of state layers.

    Args:
        request: the request.
        candidates: the state backends, usable or not. All of them appear in the record.
        dtype: resolved dtype of activations.
        rank: may order the candidates that fit a group.

    Raises:
        NegotiationError: naming layers and kinds that no backend supports, or the settings that state layers exclude.
    """
    verdicts = {group.name: _verdicts(request, group, candidates, dtype) for group in request.state_groups}
    unserved = [group for group in request.state_groups if all(verdict.reasons for verdict in verdicts[group.name])]
    if unserved:
        raise _unserved(request, candidates, dtype, unserved, verdicts)
    return tuple(
        _plan(request, group, *_ranked(group, verdicts[group.name], rank), dtype) for group in request.state_groups
    )


def _ranked(group: StateGroupRequest, verdicts: list[_Verdict], rank: Ranker) -> tuple[list[_Verdict], str]:
    """Return the verdicts with their index in a plugin's order, and the label of the plugin or ""."""
    names = tuple(verdict.candidate.name for verdict in verdicts if not verdict.reasons)
    ranking = rank("state", group.name, names) if len(names) > 1 else None
    if ranking is None:
        return verdicts, ""
    return [evolve(v, ranking=ranking.place(v.candidate.name)) for v in verdicts], ranking.label


def _verdicts(
    request: PlanRequest, group: StateGroupRequest, candidates: Sequence[Candidate], dtype: str
) -> list[_Verdict]:
    asked = request.state_backend_for(group.state_kind)
    known = {candidate.name for candidate in candidates}
    absent = [Candidate(name=name) for name in asked.value if name != AUTO and name not in known]
    return [_verdict(request, group, candidate, asked, dtype) for candidate in (*candidates, *absent)]


def _verdict(
    request: PlanRequest, group: StateGroupRequest, candidate: Candidate, asked: Asked[tuple[str, ...]], dtype: str
) -> _Verdict:
    wanted = [name for name in (candidate.name, AUTO) if name in asked.value]
    choice = () if wanted or not asked.value else (not_asked_for(asked.value, asked.origin),)
    unusable = usability(candidate)
    needs = () if unusable else part_reasons(candidate.capabilities, _needs(request, group, (dtype, STATE_DTYPE)))
    rank = asked.value.index(wanted[0]) if wanted else 0
    return _Verdict(candidate=candidate, reasons=(*unusable, *needs, *choice), rank=rank)


def _needs(request: PlanRequest, group: StateGroupRequest, pair: Pair) -> tuple[Need, ...]:
    device, longest, sharing = request.device, request.max_query_len, request.prefix_caching
    model = f"model: {group.name} layers"
    return (
        Need(capability="devices", value=device.need, origin=f"device {device.name or device.type}"),
        Need(capability="state_kinds", value=group.state_kind, origin=model),
        Need(capability="dtypes", value=pair, origin=request.dtype.origin),
        Need(capability="query_len", value=longest.value, origin=longest.origin),
        Need(capability="rollback", value=request.query_len.value > 1, origin=request.query_len.origin),
        Need(capability="checkpoints", value=sharing.value and sharing.explicit, origin=sharing.origin),
    )


def _plan(
    request: PlanRequest, group: StateGroupRequest, verdicts: list[_Verdict], ranker: str, dtype: str
) -> StateGroupPlan:
    fits = sorted((verdict for verdict in verdicts if not verdict.reasons), key=lambda verdict: verdict.order)
    chosen, candidate = fits[0], fits[0].candidate
    layers = tuple(_typed(layer, dtype) for layer in group.layers)
    return StateGroupPlan(
        name=group.name,
        layers=layers,
        backend=candidate.name,
        distribution=candidate.distribution,
        version=candidate.version,
        contract=candidate.contract or 1,
        inline=candidate.inline,
        dtype=dtype,
        state_dtype=STATE_DTYPE,
        max_query_len=request.max_query_len.value,
        graphs=_graph_states(request, candidate),
        rollback_copy=request.query_len.value > 1 and candidate.capabilities.rollback_copy,
        reason=_why_chosen(request.state_backend_for(group.state_kind), chosen, fits, ranker),
        rejected=tuple(
            _rejection(verdict, verdict.reasons or (_why_lost(verdict, chosen, ranker),))
            for verdict in verdicts
            if verdict is not chosen
        ),
    )


def _typed(layer: StateLayer, dtype: str) -> StateLayer:
    """Return the layer with ``auto`` resolved."""
    tensors = (evolve(tensor, dtype=dtype if tensor.dtype == AUTO else tensor.dtype) for tensor in layer.tensors)
    return evolve(layer, tensors=tuple(tensors))


def _why_chosen(asked: Asked[tuple[str, ...]], chosen: _Verdict, fits: list[_Verdict], ranker: str) -> str:
    if asked.value and AUTO not in asked.value:
        return f"named in {asked.origin}" if len(asked.value) == 1 else f"choice {chosen.rank + 1} of {asked.origin}"
    if len(fits) == 1:
        return "the only candidate that fits"
    if ranker and fits[1].ranking != chosen.ranking:
        return f"{len(fits)} candidates fit; {ranker} puts it first"
    return f"{len(fits)} candidates fit; decided by priority"


def _why_lost(loser: _Verdict, chosen: _Verdict, ranker: str) -> Reason:
    ours, theirs = chosen.candidate, loser.candidate
    if loser.rank != chosen.rank:
        text = f"preference: {ours.name} comes first in the configuration"
    elif loser.ranking != chosen.ranking:
        text = f"ranking: {ranker} puts {ours.name} first"
    elif theirs.capabilities.priority != ours.capabilities.priority:
        text = f"priority: {theirs.capabilities.priority}, {ours.name} has {ours.capabilities.priority}"
    else:
        text = f"name: equal in all that counts, and {ours.name} comes first by name"
    return Reason(code="N191", text=text)


def _rejection(verdict: _Verdict, reasons: tuple[Reason, ...]) -> Rejection:
    candidate = verdict.candidate
    return Rejection(
        name=candidate.name, distribution=candidate.distribution, version=candidate.version, reasons=reasons
    )


def _unserved(
    request: PlanRequest,
    candidates: Sequence[Candidate],
    dtype: str,
    groups: Sequence[StateGroupRequest],
    verdicts: dict[str, list[_Verdict]],
) -> NegotiationError:
    failures = tuple(
        GroupFailure(
            name=group.name,
            kind="state",
            layers=len(group.layers),
            rejected=tuple(_rejection(verdict, verdict.reasons) for verdict in verdicts[group.name]),
        )
        for group in groups
    )
    texts = "; ".join(f"{_named(group)} of kind {group.state_kind}" for group in groups)
    codes = {reason.code for failure in failures for item in failure.rejected for reason in item.reasons}
    remedies = tuple(text for text, other in _gentler(request) if _serves_all(other, candidates, dtype))
    code = "N500" if codes & {"N177", "N178", "N190"} else "N502"
    return _error(Failure(code=code, message=f"no state backend serves {texts}", groups=failures, remedies=remedies))


def _gentler(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Yield requests with one demand less, each with the setting."""
    if request.state_backend.explicit:
        yield f"state.backend = {toml(AUTO)}", evolve(request, state_backend=Asked(AUTO))
    if request.prefix_caching.value and request.prefix_caching.explicit:
        yield "cache.prefix_caching = false", evolve(request, prefix_caching=Asked(False))
    if request.query_len.value > 1:
        yield 'drafter.name = ""', evolve(request, query_len=Asked(1))


def _serves_all(request: PlanRequest, candidates: Sequence[Candidate], dtype: str) -> bool:
    return all(
        any(not verdict.reasons for verdict in _verdicts(request, group, candidates, dtype))
        for group in request.state_groups
    )


def _named(group: StateGroupRequest) -> str:
    names = [layer.name for layer in group.layers]
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _error(failure: Failure) -> NegotiationError:
    fix = failure.remedies[0] if failure.remedies else CODES[failure.code].fix
    return NegotiationError(f"{failure.code} {failure.message}", fix=fix, failure=failure)
