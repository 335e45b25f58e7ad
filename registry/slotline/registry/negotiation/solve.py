"""Negotiation: from a request and its candidates to one frozen plan, or to an error with remedies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation.assemble import assemble
from slotline.registry.negotiation.codes import CODES
from slotline.registry.negotiation.conflict import explain_infeasible
from slotline.registry.negotiation.edits import toml
from slotline.registry.negotiation.failure import Failure
from slotline.registry.negotiation.needs import Problem, Ranker, no_ranking
from slotline.registry.negotiation.plan import Plan
from slotline.registry.negotiation.reasons import Note
from slotline.registry.negotiation.request import AUTO, Candidate, PlanRequest
from slotline.registry.negotiation.search import Search
from slotline.registry.negotiation.state_caches import holds_states
from slotline.registry.negotiation.states import with_states


def negotiate(
    request: PlanRequest,
    attention: Sequence[Candidate],
    kv_specs: Sequence[Candidate],
    states: Sequence[Candidate] = (),
    rank: Ranker = no_ranking,
) -> Plan:
    """Find the best plan.

    Args:
        request: the request, which is not modified.
        attention: the attention backends, usable or not. All of them appear in the record.
        kv_specs: the cache specs of blocks and of states, usable or not.
        states: the state backends, usable or not. Used only if the model has state layers.
        rank: may order the candidates that fit a group.

    Returns:
        The plan. The same arguments give the same plan in every process.

    Raises:
        NegotiationError: if nothing satisfies the request, or if the request is strict and the plan differs from it.
    """
    all_specs = (*kv_specs, *_missing([asked.value for asked in request.kv_specs.values()], kv_specs))
    problem = Problem(
        request=request,
        attention=(*attention, *_missing(_backend_names(request), attention)),
        kv_specs=_specs_of_blocks(request, all_specs),
        rank=rank,
    )
    search = Search(problem)
    solution = search.best()
    if solution is None:
        raise _error(explain_infeasible(problem))
    plan = assemble(search, solution, warnings_of(problem))
    plan = with_states(plan, request, states, all_specs, rank)
    if request.strict:
        hold_strictly(plan, request.allow)
    return plan


def _specs_of_blocks(request: PlanRequest, specs: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the specs that may hold keys and values, and specs of states that were named for these layers."""
    kinds = {group.kv_kind for group in request.groups}
    named = {asked.value for kind, asked in request.kv_specs.items() if kind in kinds}
    return tuple(spec for spec in specs if spec.name in named or not holds_states(spec))


def _backend_names(request: PlanRequest) -> list[str]:
    """Return every backend that the configuration names for existing layers."""
    kinds = dict.fromkeys(group.kv_kind for group in request.groups)
    return [name for kind in kinds for name in request.backend_for(kind).value if name != AUTO]


def _missing(names: Sequence[str], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates for unknown names, which are reported as not installed."""
    known = {candidate.name for candidate in candidates}
    return [Candidate(name=name) for name in dict.fromkeys(names) if name not in known]


def warnings_of(problem: Problem) -> tuple[Note, ...]:
    """Return the warnings, which do not change the plan."""
    request = problem.request
    return (
        *_failed_imports(problem),
        *_idle_entries(request, problem.kinds),
        *(
            Note(code="N402", key="allow", text=f"there is no code {code!r}", asked=code)
            for code in request.allow
            if code not in CODES
        ),
    )


def _failed_imports(problem: Problem) -> list[Note]:
    return [
        Note(code="N002", key=candidate.name, text=candidate.load_error, resolved="not used")
        for candidate in (*problem.attention, *problem.kv_specs)
        if candidate.load_error is not None and candidate.blocked is None
    ]


def _idle_entries(request: PlanRequest, kinds: Sequence[str]) -> list[Note]:
    tables = {"cache.kv_spec": list(request.kv_specs)}
    present = {
        "cache.kv_spec": {*kinds, *(group.state_kind for group in request.state_groups)},
        "attention.backend": {group.kv_kind for group in request.groups},
        "state.backend": {group.state_kind for group in request.state_groups},
    }
    for key, asked in (("attention.backend", request.backend), ("state.backend", request.state_backend)):
        if isinstance(asked.value, Mapping):
            tables[key] = list(asked.value)
    return [
        Note(code="N401", key=f"{key}.{kind}", text=f"the model has no {kind} layers")
        for key, table in tables.items()
        for kind in table
        if kind not in present[key]
    ]


def hold_strictly(plan: Plan, allow: Sequence[str]) -> None:
    """Refuse a plan that differs from the request.

    Raises:
        NegotiationError: naming every difference whose code is not in `allow`.
    """
    failed = [note for note in plan.warnings if note.code == "N002"]
    notes = tuple(note for note in (*plan.downgrades, *failed) if note.code not in allow)
    if not notes:
        return
    codes = tuple(dict.fromkeys(note.code for note in notes))
    ways_out = notes[0].to_avoid if len(notes) == 1 else ()  # one setting removes at most one of several differences
    allowed = f"allow = {toml((*allow, *codes))}"
    message = f"strict: the plan differs from what was asked ({', '.join(codes)})"
    raise _error(Failure(code="N510", message=message, notes=notes, remedies=(*ways_out, allowed)))


def _error(failure: Failure) -> NegotiationError:
    fix = failure.remedies[0] if failure.remedies else CODES[failure.code].fix
    return NegotiationError(f"{failure.code} {failure.message}", fix=fix, failure=failure)
