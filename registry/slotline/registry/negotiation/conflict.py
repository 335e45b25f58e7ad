"""Diagnosis if there is no plan: the smallest set of needs that exclude each other, and tested remedies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from slotline.registry.negotiation.columns import place
from slotline.registry.negotiation.edits import edits_for, toml
from slotline.registry.negotiation.failure import Conflict, Failure, GroupFailure
from slotline.registry.negotiation.needs import Problem, asked_keys, dtype_pairs, inherent_keys
from slotline.registry.negotiation.offers import Offer, kv_reasons
from slotline.registry.negotiation.reasons import Reason, Rejection
from slotline.registry.negotiation.request import Asked, Candidate, PlanRequest
from slotline.registry.negotiation.search import Search, captures, must_capture


def explain_infeasible(problem: Problem) -> Failure:
    """Return the record of a problem without a solution."""
    search = Search(problem)
    asked, inherent = asked_keys(problem), inherent_keys(problem)
    conflict, *further = [
        tuple(_member(problem, key, {**asked, **inherent}[key], key in inherent) for key in keys)
        for keys in conflicts(problem, asked, inherent)
    ]
    remedies = tuple(dict.fromkeys(member.instead for member in conflict if member.instead))
    groups = _groups(search)
    code = _code(search, conflict)
    return Failure(
        code=code,
        message=_message(search, conflict, code),
        groups=groups,
        conflict=conflict,
        further=tuple(further),
        remedies=remedies or joint_remedy(problem, asked),
    )


def conflicts(problem: Problem, asked: dict[str, Asked[Any]], inherent: dict[str, Asked[Any]]) -> list[tuple[str, ...]]:
    """Return minimal conflicts that share no member, until the rest of the request can be satisfied.

    At least one conflict is returned. It is empty if there is no plan even without any needs.
    """
    found = [minimal_conflict(problem, asked, inherent)]
    while found[-1]:
        gone = [key for keys in found for key in keys]
        rest = problem.without(*gone)
        if Search(rest).best() is not None:
            break
        left = {key: value for key, value in asked.items() if key not in gone}
        found.append(minimal_conflict(rest, left, {k: v for k, v in inherent.items() if k not in gone}))
    return found


def minimal_conflict(
    problem: Problem, asked: dict[str, Asked[Any]], inherent: dict[str, Asked[Any]]
) -> tuple[str, ...]:
    """Return an irreducible set of needs that cannot be satisfied together, empty if there is no plan without needs.

    Deletion filter with halving. Needs that the user cannot change are dropped first and explicit choices last, so that
    the conflict consists of explicit choices if possible.
    """
    explicit = [key for key, value in asked.items() if value.explicit]
    open_ = [key for key in asked if key not in explicit]
    everything = [*inherent, *open_, *explicit]

    def infeasible(keys: Sequence[str]) -> bool:
        dropped = [key for key in everything if key not in keys]
        return Search(problem.without(*dropped)).best() is None

    if infeasible(()):
        return ()
    required = list(everything)
    for chunk in (list(inherent), open_, explicit):
        required = _shrink(required, chunk, infeasible)
    order = [*explicit, *open_, *inherent]
    return tuple(sorted(required, key=order.index))


def _shrink(required: list[str], chunk: list[str], infeasible: Callable[[Sequence[str]], bool]) -> list[str]:
    if not chunk:
        return required
    rest = [key for key in required if key not in chunk]
    if infeasible(rest):
        return rest
    if len(chunk) == 1:
        return required
    middle = len(chunk) // 2
    return _shrink(_shrink(required, chunk[:middle], infeasible), chunk[middle:], infeasible)


def _member(problem: Problem, key: str, asked: Asked[Any], inherent: bool) -> Conflict:
    solution = Search(problem.without(key)).best()
    instead = ""
    value = asked.value[0] if isinstance(asked.value, tuple) and len(asked.value) == 1 else asked.value
    if solution is not None and not inherent:
        edits = edits_for(problem.request, key, solution)
        instead = next((text for text, request in edits if _feasible(problem, request)), "")
    return Conflict(
        key=key,
        value=toml(value),
        origin=place(asked.origin, key),
        inherent=inherent,
        sufficient=solution is not None,
        instead=instead,
    )


def _feasible(problem: Problem, request: PlanRequest) -> bool:
    return Search(evolve(problem, request=request)).best() is not None


def joint_remedy(problem: Problem, asked: dict[str, Asked[Any]]) -> tuple[str, ...]:
    """Return, if no single change helps, a smallest set of settings that together make a plan possible, as one text."""
    waived = list(asked)
    if Search(problem.without(*waived)).best() is None:
        return ()
    for key in asked:
        fewer = [other for other in waived if other != key]
        if Search(problem.without(*fewer)).best() is not None:
            waived = fewer
    request, texts = problem.request, []
    solution = Search(problem.without(*waived)).best()
    for key in waived:
        if solution is None:
            return ()
        text, request = list(edits_for(request, key, solution))[-1]
        texts.append(text)
    return (" together with ".join(texts),) if texts and _feasible(problem, request) else ()


def _code(search: Search, conflict: tuple[Conflict, ...]) -> str:
    if _each_group_served(search):
        return "N503"
    explicit = [member for member in conflict if not member.inherent]
    if not explicit:
        return "N502"
    return "N501" if len(explicit) > 1 else "N500"


def _each_group_served(search: Search) -> bool:
    """Return True if each group and each kind has a plugin, so that only shared settings can be the cause."""
    problem = search.problem
    offers = all(any(not offer.reasons for offer in own) for own in search.offers(_pair(search)))
    return offers and all(search.specs(kind) for kind in problem.kinds) and not must_capture(problem)


def _pair(search: Search) -> tuple[str, str]:
    return dtype_pairs(search.problem)[0]


def _message(search: Search, conflict: tuple[Conflict, ...], code: str) -> str:
    if code == "N503":
        return f"no block size and layout suits all groups: {_sizes(search)}"
    if not conflict:
        return "no usable plugin is installed for what the model has"
    named = [f"{member.key} = {member.value} ({member.origin})" for member in conflict]
    if len(named) == 1:
        return f"no candidate can serve {named[0]}"
    return f"{', '.join(named[:-1])} and {named[-1]} cannot hold together"


def _sizes(search: Search) -> str:
    """Return every backend with its block sizes (behaviour 151)."""
    shown = {
        offer.candidate.name: " and ".join(align.describe() for align in offer.aligns)
        for offers in search.offers(_pair(search))
        for offer in offers
        if not offer.reasons
    }
    return "; ".join(f"{name}: {sizes}" for name, sizes in shown.items())


def _groups(search: Search) -> tuple[GroupFailure, ...]:
    problem = search.problem
    offers = search.offers(_pair(search))
    attention = [
        GroupFailure(
            name=group.name,
            kind="attention",
            layers=len(group.layers),
            rejected=tuple(_rejection(offer.candidate, _reasons(search, offer)) for offer in own),
        )
        for group, own in zip(problem.request.groups, offers, strict=True)
    ]
    return (*attention, *(_kind_failure(search, kind) for kind in problem.kinds if not search.specs(kind)))


def _reasons(search: Search, offer: Offer) -> tuple[Reason, ...]:
    """Return the candidate's own reasons. If it has none, the rest of the plan excludes it."""
    if offer.reasons:
        return offer.reasons
    problem = search.problem
    if must_capture(problem) and not captures(offer):
        text = "graph level: needs a phase that can be captured, offers none"
        return (Reason(code="N180", text=text, origin=problem.request.graphs.origin),)
    missing = [kind for kind in problem.kinds if not search.specs(kind)]
    if missing:
        return (Reason(code="N110", text=f"cache kind: no cache spec can hold {', '.join(missing)} layers"),)
    sizes = " and ".join(align.describe() for align in offer.aligns)
    text = f"fits alone (block sizes {sizes}; layouts {', '.join(offer.layouts)}), but not with the other groups"
    return (Reason(code="N145", text=text),)


def _kind_failure(search: Search, kind: str) -> GroupFailure:
    problem = search.problem
    rejected = tuple(_rejection(item, kv_reasons(problem, kind, item)) for item in problem.kv_specs)
    layers = sum(len(group.layers) for group in problem.request.groups if group.kv_kind == kind)
    return GroupFailure(name=kind, kind="kv_spec", layers=layers, rejected=rejected)


def _rejection(candidate: Candidate, reasons: tuple[Reason, ...]) -> Rejection:
    return Rejection(
        name=candidate.name, distribution=candidate.distribution, version=candidate.version, reasons=reasons
    )
