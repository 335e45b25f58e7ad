"""Assembly of the plan from a solution: the engine's decisions, and the reason why every other candidate lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slotline.registry.contracts.cache_tensors import PLAIN
from slotline.registry.negotiation import graphs
from slotline.registry.negotiation.changes import (
    backends_of,
    changes_of,
    is_downgrade,
    resolved_phases,
    with_ways_out,
)
from slotline.registry.negotiation.edits import toml
from slotline.registry.negotiation.groups import NONE, CacheGroupPlan, GraphPlan, GroupPlan
from slotline.registry.negotiation.measured import UNMEASURED, figures, in_words, told_cases
from slotline.registry.negotiation.needs import cache_format_of
from slotline.registry.negotiation.offers import Offer, cascade_refusal, cascade_state, kv_reasons
from slotline.registry.negotiation.plan import Plan
from slotline.registry.negotiation.reasons import Note, Reason, Rejection
from slotline.registry.negotiation.request import AUTO, EIGHT_BIT, Asked, Candidate, Setting
from slotline.registry.negotiation.search import CRITERIA, CachePart, Search, Solution, is_exact


def assemble(search: Search, solution: Solution, warnings: tuple[Note, ...]) -> Plan:
    """Return the plan of a solution."""
    request = search.problem.request
    notes = with_ways_out(search, solution, changes_of(search, solution))
    dtype, kv_dtype = solution.pair
    return Plan(
        device=request.device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=solution.block_size,
        cache_groups=_cache_groups(search, solution),
        groups=tuple(_group(search, solution, index) for index in range(len(request.groups))),
        graphs=_graphs(search, solution),
        downgrades=tuple(note for note in notes if is_downgrade(note)),
        warnings=warnings,
        notes=tuple(note for note in notes if not is_downgrade(note)),
        settings=(*_settings(search, solution), *request.settings),
        parts=request.parts,
        facts=request.facts,
        measured="" if request.measured is None else f"{request.measured.origin}: {request.measured.source}",
        stages=request.stages,
    )


def _cache_groups(search: Search, solution: Solution) -> tuple[CacheGroupPlan, ...]:
    return tuple(_cache_group(search, solution, part, part.spec) for part in solution.parts if part.spec is not None)


def _cache_group(search: Search, solution: Solution, part: CachePart, spec: Candidate) -> CacheGroupPlan:
    groups = [search.problem.request.groups[index] for index in part.members]
    kinds = tuple(dict.fromkeys(group.kv_kind for group in groups))
    own = [layer for group in groups for layer in group.layers if layer.shares_kv_with is None]
    return CacheGroupPlan(
        name=_cache_name(solution, part),
        kv_spec=spec.name,
        distribution=spec.distribution,
        version=spec.version,
        contract=spec.contract or 1,
        kinds=kinds,
        inexact=tuple(kind for kind in kinds if not is_exact(spec, kind)),
        layers=tuple(sorted(own, key=lambda layer: layer.index)),
        block_size=solution.block_size,
        kernel_block_size=part.kernel_block_size,
        layout=part.layout,
        format=cache_format_of(search.problem, kinds[0])[0],
        reason=_spec_reason(search, kinds, spec),
        rejected=tuple(_spec_rejections(search, solution, kinds, spec)),
    )


def _cache_name(solution: Solution, part: CachePart) -> str:
    name, *reach = part.key
    alone = sum(other.key[0] == name for other in solution.parts) == 1
    if not name:
        return ""
    numbers = [str(number) for number in reach if number is not None]
    return name if alone else "_".join([name, *numbers])


def _spec_reason(search: Search, kinds: tuple[str, ...], spec: Candidate) -> str:
    named = [kind for kind in kinds if kind in search.problem.request.kv_specs]
    if named:
        return f"named in {search.problem.request.kv_specs[named[0]].origin}"
    others = [item.name for kind in kinds for item in search.specs(kind) if item is not spec]
    if not others:
        return "the only one that fits"
    return "exact for its layers" if all(is_exact(spec, kind) for kind in kinds) else "the best of those that fit"


def _spec_rejections(
    search: Search, solution: Solution, kinds: tuple[str, ...], spec: Candidate
) -> Iterator[Rejection]:
    """Yield the reasons why the other specs do not hold these kinds."""
    problem = search.problem
    for item in problem.kv_specs:
        if item is spec:
            continue
        own = (kv_reasons(problem, kind, item) or (_why_spec_lost(search, solution, kind, item),) for kind in kinds)
        yield _rejection(item, tuple(dict.fromkeys(reason for reasons in own for reason in reasons)))


def _why_spec_lost(search: Search, solution: Solution, kind: str, spec: Candidate) -> Reason:
    other = search.best(spec=(kind, spec))
    if other is None:
        return Reason(code="N145", text="nothing in common with the other groups: no block size suits it and them")
    chosen, criterion = solution.specs[kind], _first_difference(other, solution)
    text = {
        "cache spec": f"cache spec: {spec.name} wastes more or shares less than {chosen.name}",
        "cache spec priority": f"priority: {spec.capabilities.priority}, "
        f"{chosen.name} has {chosen.capabilities.priority}",
        "block size changed": f"block size: it would change the block size to {other.block_size}",
    }.get(criterion, f"{criterion}: {chosen.name} gives the better plan")
    return Reason(code="N191", text=text)


def _rejection(source: Candidate, reasons: tuple[Reason, ...]) -> Rejection:
    return Rejection(name=source.name, distribution=source.distribution, version=source.version, reasons=reasons)


def _first_difference(other: Solution, solution: Solution) -> str:
    """Return the most important criterion in which two solutions differ."""
    places = (i for i, (a, b) in enumerate(zip(other.cost, solution.cost, strict=True)) if a != b)
    return CRITERIA[next(places, len(CRITERIA) - 1)]


def _group(search: Search, solution: Solution, index: int) -> GroupPlan:
    request = search.problem.request
    group, offer, part = request.groups[index], solution.offer(index), solution.part(index)
    candidate = offer.candidate
    offered = candidate.capabilities
    rejected, reason = _rejections(search, solution, index)
    return GroupPlan(
        name=group.name,
        layers=group.layers,
        backend=candidate.name,
        distribution=candidate.distribution,
        version=candidate.version,
        contract=candidate.contract or 1,
        inline=candidate.inline,
        cache_group=_cache_name(solution, part),
        kv_spec="" if part.spec is None else part.spec.name,
        block_size=solution.block_size,
        kernel_block_size=part.kernel_block_size,
        layout=part.layout,
        dtype=solution.pair[0],
        kv_dtype=solution.pair[1],
        query_len=request.query_len.value,
        max_query_len=max(request.max_query_len.value, request.query_len.value),
        graphs=offer.graphs,
        cascade=_cascade(search, solution, index),
        cascade_refusal=_cascade_refusal(search, solution, index),
        kv_scales=(request.kv_scales.value or "1")
        if solution.pair[1] in EIGHT_BIT and group.has_cache and not request.cache_format
        else "",
        cache_format=cache_format_of(search.problem, group.kv_kind)[0] if group.has_cache else PLAIN,
        approximate="" if offered.exact.support else offered.exact.note or "the backend approximates",
        fast_prefill=group.fast_prefill,
        last_queries=group.last_queries
        and offered.several_plans
        and not offered.writes_cache
        and not group.layer.inputs,
        reason=reason,
        rejected=rejected,
    )


def _cascade(search: Search, solution: Solution, index: int) -> str:
    """Return the group's cascade state. Without shared blocks there are no common prefixes."""
    if not _shares(search, solution):
        return NONE
    group, candidate = search.problem.request.groups[index], solution.offer(index).candidate
    return cascade_state(search.problem, group, candidate, solution.pair)


def _cascade_refusal(search: Search, solution: Solution, index: int) -> str:
    if not _shares(search, solution):
        return ""
    group, candidate = search.problem.request.groups[index], solution.offer(index).candidate
    return cascade_refusal(search.problem, group, candidate, solution.pair)


def _shares(search: Search, solution: Solution) -> bool:
    request = search.problem.request
    asked = request.prefix_caching.value
    return asked and not any(search.loses_prefix_caching(spec) for spec in solution.specs.values())


def _rejections(search: Search, solution: Solution, index: int) -> tuple[tuple[Rejection, ...], str]:
    """Return the reasons why the other candidates lost, and one line on why this one won."""
    chosen = solution.offer(index)
    rejected, decided = [], []
    for offer in search.offers(solution.pair)[index]:
        if offer.candidate is chosen.candidate:
            continue
        reasons, criterion = offer.reasons, ""
        if not reasons:
            lost, criterion = _why_lost(search, solution, index, offer)
            reasons = (lost,)
        decided += [criterion] if criterion else []
        rejected.append(_rejection(offer.candidate, reasons))
    return tuple(rejected), _why_chosen(search, solution, index, chosen, decided)


def _why_chosen(search: Search, solution: Solution, index: int, chosen: Offer, decided: list[str]) -> str:
    request = search.problem.request
    asked = request.backend_for(request.groups[index].kv_kind)
    if asked.value and AUTO not in asked.value:
        return f"named in {asked.origin}" if len(asked.value) == 1 else f"choice {chosen.rank + 1} of {asked.origin}"
    if not decided:
        return "the only candidate that fits"
    closest = max(decided, key=CRITERIA.index)
    if closest == "measured":
        return _chosen_by_measurement(search, solution, index, chosen)
    if closest == "preference" and (ranker := _ranker(search, index)) and asked.value in ((), (AUTO,)):
        return f"{len(decided) + 1} candidates fit; {ranker} puts it first"
    note = chosen.candidate.capabilities.priority_reason
    because = f" ({note})" if closest == "priority" and note else ""
    figures = _cost_text(search, index, chosen)
    known = "too close in their measured times" if figures else "not measured here"
    return f"{len(decided) + 1} candidates fit, {known}; decided by {closest}{because}"


def _chosen_by_measurement(search: Search, solution: Solution, index: int, chosen: Offer) -> str:
    """Return the measured times of the chosen backend and of the second best."""
    measured = search.problem.request.measured
    assert measured is not None
    rivals = [o for o in search.offers(solution.pair)[index] if not o.reasons and o.candidate is not chosen.candidate]
    rival = min(rivals, key=lambda offer: offer.order)
    theirs = _cost_text(search, index, rival)
    against = f"against {theirs} of {rival.candidate.name}" if theirs else f"{rival.candidate.name} has no figure"
    return f"chosen by measurement: {_cost_text(search, index, chosen)} {against}, {measured.origin}"


def _cost_text(search: Search, index: int, offer: Offer) -> str:
    """Return the measured time of a step with an offer, or "" without one."""
    request = search.problem.request
    if request.measured is None or offer.measured in (0, UNMEASURED):
        return ""
    run = request.measured.of_backend(request, request.groups[index].kv_kind, offer.candidate)
    return "" if run is None else in_words(request.measured.cost(run))


def _why_lost(search: Search, solution: Solution, index: int, offer: Offer) -> tuple[Reason, str]:
    """Solve again with the candidate forced, and name the first criterion by which the result is worse."""
    other = search.best(forced={index: offer.candidate})
    if other is None:
        text = "nothing in common with the other groups: no block size and layout suits it and them"
        return Reason(code="N145", text=text), ""
    criterion = _first_difference(other, solution)
    if criterion == "measured":
        return Reason(code="N191", text=_slower_text(search, solution, index, offer)), criterion
    if criterion == "preference" and offer.rank == solution.offer(index).rank:
        ours = solution.offer(index).candidate.name
        return Reason(code="N191", text=f"ranking: {_ranker(search, index)} puts {ours} first"), criterion
    return Reason(code="N191", text=_loss_text(solution, other, index, offer, criterion)), criterion


def _ranker(search: Search, index: int) -> str:
    """Return the label of the plugin that ordered the candidates of a group, or "" without one."""
    return search.ranked_by.get(search.problem.request.groups[index].name, "")


def _slower_text(search: Search, solution: Solution, index: int, offer: Offer) -> str:
    """Return how much slower a candidate was, or the reason why it has no measured time."""
    request, chosen = search.problem.request, solution.offer(index)
    assert request.measured is not None
    own = _cost_text(search, index, offer)
    if not own:
        run = request.measured.of_backend(request, request.groups[index].kv_kind, offer.candidate)
        own = f"failed ({run.failure})" if run is not None and run.failure else "no figure"
    ours = f"{chosen.candidate.name} {_cost_text(search, index, chosen)}"
    return f"measured: {own}, {ours} ({request.measured.origin})"


def _loss_text(solution: Solution, other: Solution, index: int, offer: Offer, criterion: str) -> str:
    chosen = solution.offer(index)
    ours, theirs = chosen.candidate, offer.candidate
    if criterion == "priority":
        note = theirs.capabilities.priority_reason
        own = f"priority: {theirs.capabilities.priority}{f' ({note})' if note else ''}"
        return f"{own}, {ours.name} has {ours.capabilities.priority}"
    return {
        "dtype": f"dtype: it would need {'/'.join(other.pair)}",
        "preference": f"preference: {ours.name} comes first in the configuration",
        "graphs": f"graphs: {offer.loss} wanted phases break at it, {chosen.loss} at {ours.name}",
        "block size changed": f"block size: it would change the block size to {other.block_size}",
        "block size distance": f"block size: it would need {other.block_size}, {ours.name} takes {solution.block_size}",
        "name": f"name: equal in all that counts, and {ours.name} comes first by name",
    }.get(criterion, f"{criterion}: {ours.name} gives the better plan")


def _graphs(search: Search, solution: Solution) -> GraphPlan:
    request = search.problem.request
    phases = resolved_phases(search, solution)
    reason = ""
    if not request.device.graphs.support:
        reason = graphs.without_graphs(request.device)
    elif request.uncaptured:
        reason = request.uncaptured
    elif request.graphs.value == AUTO:
        reason = f"auto aims at {graphs.effective_mode(request)}"
    return GraphPlan(
        asked=request.graphs.value,
        resolved=graphs.resolved_mode(phases),
        phases=tuple(phases.items()),
        reason=reason,
        measured=_measured_modes(search, solution),
    )


def _measured_modes(search: Search, solution: Solution) -> str:
    """Return the time of each graph mode that was measured with these backends."""
    request = search.problem.request
    if request.measured is None:
        return ""
    runs = request.measured.of_modes(backends_of(search, solution), solution.block_size)
    cases = [case for case in request.measured.cases if case in told_cases(request.measured)]
    texts = [f"{run.graphs}: {figures(run, cases)}" for run in runs]
    return f"{'; '.join(texts)} ({request.measured.origin})" if len(texts) > 1 else ""


def _settings(search: Search, solution: Solution) -> Iterator[Setting]:
    request = search.problem.request
    backends = backends_of(search, solution)
    specs = {kind: spec.name for kind, spec in solution.specs.items()}
    layouts = dict.fromkeys(part.layout for part in solution.parts)
    asked_specs = {kind: asked.value for kind, asked in request.kv_specs.items()}
    origins = ", ".join(dict.fromkeys(asked.origin for asked in request.kv_specs.values()))
    dtype = request.dtype if request.dtype.explicit else Asked(AUTO, request.dtype.origin)
    yield _setting("dtype", dtype, solution.pair[0])
    yield _setting("attention.backend", request.backend, _one_or_table(backends))
    yield _setting("attention.layout", request.layout, ", ".join(layouts))
    apart = any(_cascade(search, solution, index) != NONE for index in range(len(request.groups)))
    yield _setting("attention.cascade", request.cascade, apart)
    yield _setting("cache.block_size", request.block_size, solution.block_size)
    yield _setting("cache.dtype", request.kv_dtype, solution.pair[1])
    yield _setting(
        "cache.kv_spec", Asked(asked_specs or AUTO, origins or "default", bool(asked_specs)), _one_or_table(specs)
    )
    yield _setting("cache.prefix_caching", request.prefix_caching, _shares(search, solution))
    yield _setting("graphs.mode", request.graphs, graphs.resolved_mode(resolved_phases(search, solution)))


def _one_or_table(names: dict[str, str]) -> object:
    distinct = sorted(set(names.values()))
    return names if len(distinct) > 1 else "".join(distinct) or "none"


def _setting(key: str, asked: Asked[Any], resolved: object) -> Setting:
    return Setting(
        key=key, asked=_show(asked.value), resolved=_show(resolved), origin=asked.origin, explicit=asked.explicit
    )


def _show(value: object) -> str:
    return value if isinstance(value, str) else toml(value)
