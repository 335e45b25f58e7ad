"""Differences between the plan and the request or the usual plan, with every limiting party and a tested way out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from attrs import evolve

from slotline.registry.negotiation import block_sizes, graphs
from slotline.registry.negotiation.codes import CODES, Severity
from slotline.registry.negotiation.edits import Edit, backend_edit, kv_spec_edit, value_edit
from slotline.registry.negotiation.groups import CAPTURED
from slotline.registry.negotiation.measured import figures, told_cases
from slotline.registry.negotiation.needs import backend_key, conditions, group_needs
from slotline.registry.negotiation.offers import graph_refusals, phase_lens
from slotline.registry.negotiation.reasons import Note
from slotline.registry.negotiation.request import AUTO, Asked
from slotline.registry.negotiation.search import Search, Solution, is_exact

MOST_WAYS_OUT = 3


def changes_of(search: Search, solution: Solution) -> tuple[Note, ...]:
    """Return every change of the solution, without ways out, in a fixed order."""
    return (
        *_dtype(search, solution),
        *_later_choice(search, solution),
        *block_sizes.changed(search, solution),
        *block_sizes.preferred(search, solution),
        *block_sizes.split(solution),
        *_graphs(search, solution),
        *_inexact(search, solution),
        *_prefix_caching(search, solution),
    )


def with_ways_out(search: Search, solution: Solution, notes: tuple[Note, ...]) -> tuple[Note, ...]:
    """Return the notes with ways out: settings under which a downgrade disappears and no other one appears."""
    before = Counter(note.code for note in notes if is_downgrade(note))
    return tuple(
        evolve(note, to_avoid=_ways_out(search, solution, note, before)) if is_downgrade(note) else note
        for note in notes
    )


def is_downgrade(note: Note) -> bool:
    """Return True if a note's code is a downgrade."""
    return CODES[note.code].severity is Severity.DOWNGRADE


def _ways_out(search: Search, solution: Solution, note: Note, before: Counter[str]) -> tuple[str, ...]:
    found: list[str] = []
    for text, request in _edits(search, solution, note):
        if len(found) == MOST_WAYS_OUT:
            break
        other = Search(evolve(search.problem, request=request))
        best = other.best()
        if best is None or text in found:
            continue
        after = [item for item in changes_of(other, best) if is_downgrade(item)]
        if Counter(item.code for item in after) < before and not _still(note, after):
            found.append(text)
    return tuple(found)


def _still(note: Note, after: list[Note]) -> bool:
    return any((item.code, item.key) == (note.code, note.key) for item in after)


def _edits(search: Search, solution: Solution, note: Note) -> Iterator[Edit]:
    """Yield settings that might help: other backends first, then explicitly requesting the resolved value."""
    request = search.problem.request
    kinds = {group.kv_kind for group in request.groups}
    if note.code in ("N301", "N310", "N320"):
        for name in _alternatives(search, solution):
            yield backend_edit(request, dict.fromkeys(kinds, name))
            for kind in sorted(kinds) if len(kinds) > 1 else ():
                yield backend_edit(request, {kind: name})
    if note.code == "N301":
        yield value_edit(request, "cache.block_size", "block_size", solution.block_size)
    elif note.code == "N303":
        chosen = {g.kv_kind: solution.offer(i).candidate.name for i, g in enumerate(request.groups)}
        yield backend_edit(request, chosen)
    elif note.code in ("N310", "N311", "N312"):
        yield value_edit(request, "graphs.mode", "graphs", note.resolved)
    elif note.code == "N320":
        yield value_edit(request, "dtype", "dtype", solution.pair[0])
    elif note.code == "N330":
        kind = note.key.rsplit(".", 1)[1]
        yield kv_spec_edit(request, kind, solution.specs[kind].name)
    elif note.code == "N331":
        yield value_edit(request, "cache.prefix_caching", "prefix_caching", False)


def _alternatives(search: Search, solution: Solution) -> list[str]:
    chosen = {offer.candidate.name for part in solution.parts for offer in part.offers}
    usable = (item.name for item in search.problem.attention if item.capabilities is not None)
    return [name for name in usable if name not in chosen] + sorted(chosen)


def _dtype(search: Search, solution: Solution) -> Iterator[Note]:
    asked, got = search.problem.request.dtype, solution.pair[0]
    if got == asked.value:
        return
    because = tuple(
        f"{offer.candidate.name} offers {offer.candidate.capabilities.dtypes.describe()}"
        for offer in search.offers((asked.value, asked.value))[0]
        if offer.candidate.capabilities is not None
    )
    text = f"{asked.value} ({asked.origin}) is not to be had; {got} instead"
    yield Note(code="N320", key="dtype", text=text, asked=asked.value, resolved=got, because=because)


def _later_choice(search: Search, solution: Solution) -> Iterator[Note]:
    request = search.problem.request
    for index, group in enumerate(request.groups):
        asked, offer = request.backend_for(group.kv_kind), solution.offer(index)
        if not asked.value or offer.rank == 0:
            continue
        earlier = asked.value[: offer.rank]
        yield Note(
            code="N303",
            key=f"{backend_key(request, group.kv_kind)}[{group.name}]",
            text=f"{group.name}: {', '.join(earlier)} cannot serve it, {offer.candidate.name} can",
            asked=", ".join(asked.value),
            resolved=offer.candidate.name,
            because=tuple(_why_passed_over(search, solution, index, name) for name in earlier),
        )


def _why_passed_over(search: Search, solution: Solution, index: int, name: str) -> str:
    offers = [offer for offer in search.offers(solution.pair)[index] if offer.candidate.name == name]
    reasons = [f"{reason.code} {reason.text}" for offer in offers for reason in offer.reasons]
    return f"{name}: {'; '.join(reasons) or 'no block size or layout in common with the other groups'}"


def _graphs(search: Search, solution: Solution) -> Iterator[Note]:
    request = search.problem.request
    asked, device = request.graphs, request.device
    if not device.graphs.support:
        if asked.value not in (AUTO, "none"):
            text = f"{asked.value} ({asked.origin}): {graphs.without_graphs(device)}"
            reason = (f"device {device.name or device.type}",)
            yield Note(code="N311", key="graphs.mode", text=text, asked=asked.value, resolved="none", because=reason)
        return
    if request.uncaptured:
        if asked.value != "none":
            text = f"{asked.value} ({asked.origin}): no forward pass can be captured"
            why = (request.uncaptured,)
            yield Note(code="N312", key="graphs.mode", text=text, asked=asked.value, resolved="none", because=why)
        return
    because = tuple(_graph_limits(search, solution))
    if because:
        mode = graphs.effective_mode(request)
        resolved = resolved_graphs(search, solution)
        yield Note(
            code="N310",
            key="graphs.mode",
            text=f"{mode} ({asked.origin}) does not hold for every group; {resolved} over all",
            asked=asked.value,
            resolved=resolved,
            because=(*because, *_cost_of_downgrade(search, solution)),
        )


def _graph_limits(search: Search, solution: Solution) -> Iterator[str]:
    problem = search.problem
    request = problem.request
    mode = graphs.effective_mode(request)
    for index, group in enumerate(request.groups):
        offer = solution.offer(index)
        needs = group_needs(problem, group, solution.pair)
        active = conditions(needs, request.query_len.value, solution.pair)
        lens = phase_lens(problem)
        for phase, state in offer.graphs:
            if graphs.wanted(mode, phase) == graphs.FULL and state != CAPTURED:
                texts = graph_refusals(offer.candidate, needs, active, lens[phase], phase)
                yield f"{group.name}, {phase}: {offer.candidate.name} {'; '.join(texts)}"


def _cost_of_downgrade(search: Search, solution: Solution) -> Iterator[str]:
    """Yield the measured cost of the lost graphs, if both modes were measured."""
    request, measured = search.problem.request, search.problem.request.measured
    if measured is None:
        return
    own = measured.of_modes(backends_of(search, solution), solution.block_size)
    mine = next((run for run in own if run.graphs == resolved_graphs(search, solution)), None)
    usable = [item for item in search.problem.attention if item.capabilities is not None]
    free = evolve(request, backend=Asked(AUTO), graphs=Asked(AUTO), block_size=Asked(AUTO))
    best = measured.best(free, usable)
    if mine is None or best is None or measured.cost(best) >= measured.cost(mine):
        return
    cases = told_cases(measured)
    names = ", ".join(dict.fromkeys(best.backends.values()))
    text = f"{figures(mine, cases)} so; {figures(best, cases)} with {names} and graphs.mode = {best.graphs!r}"
    yield f"measured cost: {text} ({measured.origin})"


def backends_of(search: Search, solution: Solution) -> dict[str, str]:
    """Return the chosen backend of each cache kind."""
    groups = search.problem.request.groups
    return {group.kv_kind: solution.offer(index).candidate.name for index, group in enumerate(groups)}


def resolved_phases(search: Search, solution: Solution) -> dict[str, str]:
    """Return the state of each phase over all groups."""
    states = [dict(solution.offer(index).graphs) for index in range(len(search.problem.request.groups))]
    phases = graphs.phases_of(search.problem.request.query_len.value)
    return {phase: graphs.phase_state([state[phase] for state in states]) for phase in phases}


def resolved_graphs(search: Search, solution: Solution) -> str:
    """Return the mode over all groups by its configuration name."""
    return graphs.resolved_mode(resolved_phases(search, solution))


def _inexact(search: Search, solution: Solution) -> Iterator[Note]:
    request = search.problem.request
    for kind, spec in solution.specs.items():
        if kind in request.kv_specs or is_exact(spec, kind):
            continue
        yield Note(
            code="N330",
            key=f"cache.kv_spec.{kind}",
            text=f"{kind} layers are kept by {spec.name}, which does not free what they no longer read",
            asked=AUTO,
            resolved=spec.name,
            because=(f"no usable cache spec is exact for {kind}",),
        )


def _prefix_caching(search: Search, solution: Solution) -> Iterator[Note]:
    losing = [spec for spec in solution.specs.values() if search.loses_prefix_caching(spec)]
    because = [f"{spec.name}: {spec.capabilities.prefix_caching.describe()}" for spec in losing]
    if because:
        yield Note(
            code="N331",
            key="cache.prefix_caching",
            text="prefix caching is off",
            asked="true",
            resolved="false",
            because=tuple(dict.fromkeys(because)),
        )
