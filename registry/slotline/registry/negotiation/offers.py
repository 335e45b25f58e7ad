"""Unary filter: one group against one candidate, with all reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from slotline.registry.capability import Align, Capability, Limit
from slotline.registry.negotiation import graphs
from slotline.registry.negotiation.codes import CODES, code_of
from slotline.registry.negotiation.groups import CAPTURED, EAGER, NONE
from slotline.registry.negotiation.measured import UNMEASURED
from slotline.registry.negotiation.needs import (
    GroupNeed,
    Pair,
    Problem,
    backend_key,
    cache_format_of,
    conditions,
    group_needs,
    model_key,
    sees_all,
)
from slotline.registry.negotiation.reasons import Reason
from slotline.registry.negotiation.request import AUTO, Asked, Candidate, GroupRequest, Need

MOST_RANKED = 1000
"""Bound on the candidates of all groups that plugins rank."""


@frozen(kw_only=True)
class Offer:
    """Offer of a candidate to one group under one dtype pair.

    Attributes:
        candidate: the candidate.
        reasons: the reasons against it. Empty if it may be chosen.
        aligns: block sizes that its kernels accept. All must hold.
        preferred: block sizes with the fastest kernels, each with its condition in words. All must hold.
        layouts: its layouts, preferred first.
        graphs: (phase, state) under the intended mode.
        loss: phases that were wanted inside the graph but cannot be captured.
        rank: index in the user's order of preference.
        ranking: index in the order returned by a plugin's `slotline_rank_candidates`, 0 for all without one.
        measured: nanoseconds of a step with it, 0 for all without measurements.
        noise: relative noise of `measured`.
    """

    candidate: Candidate
    reasons: tuple[Reason, ...]
    aligns: tuple[Any, ...] = ()
    preferred: tuple[tuple[Any, str], ...] = ()
    layouts: tuple[str, ...] = ()
    graphs: tuple[tuple[str, str], ...] = ()
    loss: int = 0
    rank: int = 0
    ranking: int = 0
    measured: int = 0
    noise: float = 0.0

    def accepts_block(self, size: int) -> bool:
        """Return True if its kernels accept the block size."""
        return all(align.refusal(size) is None for align in self.aligns)

    def prefers_block(self, size: int) -> bool:
        """Return True if its kernels are fastest with the block size, as far as it declares that."""
        return all(align.refusal(size) is None for align, _ in self.preferred)

    @property
    def preference(self) -> int:
        """User's order of preference, and within it the order given by a plugin."""
        return self.rank * MOST_RANKED + self.ranking

    @property
    def order(self) -> tuple[int, int, int, int, str, str]:
        """Sort key among offers that accept the same blocks and layout. Smaller is better."""
        candidate = self.candidate
        static = (self.loss, -candidate.capabilities.priority, candidate.name, candidate.distribution)
        return (self.preference, self.measured, *static)


def offer_of(problem: Problem, group: GroupRequest, candidate: Candidate, pair: Pair) -> Offer:
    """Compare one candidate with one group."""
    rank, choice = _preference(problem, group, candidate)
    unusable = usability(candidate)
    if unusable:
        return Offer(candidate=candidate, reasons=(*unusable, *choice), rank=rank)
    needs = group_needs(problem, group, pair)
    if candidate.name in problem.request.backend_for(group.kv_kind).value:
        needs = tuple(need for need in needs if need.capability != "exact")  # a named one may approximate
    active = conditions(needs, problem.request.query_len.value, pair)
    aligns = _effective(candidate, "kernel_block_sizes", active)
    layouts = _layouts(candidate, active)
    states = _graph_states(problem, candidate, needs, active)
    refusals = _refusals(candidate, needs, active)
    joint = _joint_refusals(problem, aligns, layouts)
    measured, noise = _measured(problem, group, candidate, pair)
    return Offer(
        candidate=candidate,
        reasons=(*refusals, *joint, *choice),
        aligns=aligns,
        preferred=_preferred(candidate, active),
        layouts=layouts,
        graphs=states,
        loss=_loss(problem, states),
        rank=rank,
        measured=measured,
        noise=noise,
    )


def _measured(problem: Problem, group: GroupRequest, candidate: Candidate, pair: Pair) -> tuple[int, float]:
    """Return the measured time with a candidate, and its noise."""
    request, measured = problem.request, problem.request.measured
    if measured is None or (measured.dtype, measured.kv_dtype) != pair:
        return 0, 0.0
    run = measured.of_backend(request, group.kv_kind, candidate)
    return (UNMEASURED, 0.0) if run is None else (measured.cost(run), run.noise)


def usability(candidate: Candidate) -> tuple[Reason, ...]:
    """Return the reasons why a plugin cannot be used for any request."""
    if candidate.blocked is not None:
        return (_plain("N004", candidate.blocked),)
    if candidate.load_error is not None:
        return (_plain("N002", candidate.load_error),)
    if candidate.contract is None:
        return (_plain("N003", candidate.contract_error or "no version in common with this slotline"),)
    if not candidate.installed:
        return (_plain("N001", f"no plugin is called {candidate.name!r}"),)
    if candidate.probe_refusal is not None:
        return (_plain("N005", candidate.probe_refusal),)
    return ()


def reason_of(capability: str, refusal: str, origin: str = "") -> Reason:
    """Return a refusal with its code and title."""
    code = code_of(capability)
    title = capability.replace("_", " ") if code == "N179" else CODES[code].title
    return Reason(code=code, text=f"{title}: {refusal}", origin=origin)


def _plain(code: str, text: str) -> Reason:
    return Reason(code=code, text=f"{CODES[code].title}: {text}")


def _preference(problem: Problem, group: GroupRequest, candidate: Candidate) -> tuple[int, tuple[Reason, ...]]:
    request = problem.request
    asked = request.backend_for(group.kv_kind)
    rank = _rank(asked, candidate.name)
    if rank is None and problem.insists(backend_key(request, group.kv_kind)):
        return len(asked.value), (not_asked_for(asked.value, asked.origin),)
    return len(asked.value) if rank is None else rank, ()


def not_asked_for(names: Sequence[str], origin: str) -> Reason:
    """Return the reason of a plugin that the configuration excludes by naming others."""
    named = ", ".join(names)
    return Reason(code="N190", text=f"{CODES['N190'].title}: {origin} names {named}", origin=origin)


def _rank(asked: Asked[tuple[str, ...]], name: str) -> int | None:
    if not asked.value:
        return 0
    for wanted in (name, AUTO):
        if wanted in asked.value:
            return asked.value.index(wanted)
    return None


def _limits(candidate: Candidate, capability: str, active: frozenset[str]) -> list[Limit]:
    return _limits_of(candidate.capabilities, capability, active)


def _limits_of(capabilities: Any, capability: str, active: frozenset[str]) -> list[Limit]:
    limits: Sequence[Limit] = getattr(capabilities, "limits", ())
    return [limit for limit in limits if limit.capability == capability and limit.when in active]


def _effective(candidate: Candidate, capability: str, active: frozenset[str]) -> tuple[Any, ...]:
    """Return the offer and its limits under the active conditions. A need must pass all of them."""
    offers = [getattr(candidate.capabilities, capability, None)]
    offers += [limit.offer for limit in _limits(candidate, capability, active)]
    return tuple(offer for offer in offers if offer is not None)


def _preferred(candidate: Candidate, active: frozenset[str]) -> tuple[tuple[Any, str], ...]:
    """Return the block sizes that a candidate prefers for a group with these conditions, and the reasons."""
    name = "preferred_block_sizes"
    offers = [(candidate.capabilities.preferred_block_sizes, "")]
    offers += [(limit.offer, f" with {limit.when}{_because(limit)}") for limit in _limits(candidate, name, active)]
    return tuple((align, align.describe() + why) for align, why in offers if align != Align())


def _refusals(candidate: Candidate, needs: Sequence[GroupNeed], active: frozenset[str]) -> tuple[Reason, ...]:
    reasons = [reason for need in needs for reason in _refusals_of(candidate, need, active)]
    return tuple(dict.fromkeys(reasons))


def _refusals_of(candidate: Candidate, need: GroupNeed, active: frozenset[str]) -> list[Reason]:
    if need.capability == "min_compute_capability":
        return _compute_capability(candidate, need)
    return refusals_of(candidate.capabilities, need, active, "backend")


def refusals_of(capabilities: Any, need: GroupNeed | Need, active: frozenset[str], who: str) -> list[Reason]:
    """Return the reasons why an offer does not cover a need, including limits under the active conditions."""
    offer: Capability | None = getattr(capabilities, need.capability, None)
    if offer is None:
        return [reason_of(need.capability, f"needs it, the {who} says nothing of it", need.origin)]
    refusal = offer.refusal(need.value)
    if refusal is not None:
        return [reason_of(need.capability, refusal, need.origin)]
    return [
        reason_of(need.capability, f"{text} with {limit.when}{_because(limit)}", need.origin)
        for limit in _limits_of(capabilities, need.capability, active)
        if (text := limit.offer.refusal(need.value)) is not None
    ]


def _because(limit: Limit) -> str:
    return f" ({limit.note})" if limit.note else ""


def _compute_capability(candidate: Candidate, need: GroupNeed) -> list[Reason]:
    lowest = candidate.capabilities.min_compute_capability
    if lowest is None or need.value >= lowest:
        return []
    has, needs = (".".join(map(str, version)) for version in (need.value, lowest))
    return [reason_of(need.capability, f"needs {needs} or newer, the device has {has}", need.origin)]


def _layouts(candidate: Candidate, active: frozenset[str]) -> tuple[str, ...]:
    offers = _effective(candidate, "layouts", active)
    return tuple(name for name in offers[0].options if all(offer.refusal(name) is None for offer in offers[1:]))


def _joint_refusals(problem: Problem, aligns: Sequence[Align], layouts: tuple[str, ...]) -> list[Reason]:
    """Return refusals of an explicit block size and layout, which concern single candidates once they are fixed."""
    request = problem.request
    reasons = []
    size, layout = request.block_size, request.layout
    if isinstance(size.value, int) and problem.insists("cache.block_size") and not kernel_sizes(size.value, [aligns]):
        offers = " and ".join(align.describe() for align in aligns)
        refusal = f"needs a size that divides {size.value}, offers {offers}"
        reasons.append(reason_of("kernel_block_sizes", refusal, size.origin))
    if layout.value != AUTO and problem.insists("attention.layout") and layout.value not in layouts:
        refusal = f"needs {layout.value}, offers {' > '.join(layouts) or 'none'}"
        reasons.append(reason_of("layouts", refusal, layout.origin))
    return reasons


def kernel_sizes(block_size: int, offers: Sequence[Sequence[Align]], splittable: bool = True) -> list[int]:
    """Return kernel block sizes that every offer accepts, best first.

    The manager's size comes first, then its exact divisors, largest first. Behaviour 151 of the specification.
    """
    aligns = [align for offer in offers for align in offer]
    sizes = [block_size, *(divisors(block_size, aligns) if splittable else ())]
    return [size for size in sizes if all(align.refusal(size) is None for align in aligns)]


def divisors(block_size: int, aligns: Sequence[Align]) -> list[int]:
    """Return the sizes named exactly by any offer that are proper divisors of the manager's size, largest first."""
    exact = {size for align in aligns for size in align.exact}
    return sorted((size for size in exact if 0 < size < block_size and block_size % size == 0), reverse=True)


def _graph_states(
    problem: Problem, candidate: Candidate, needs: Sequence[GroupNeed], active: frozenset[str]
) -> tuple[tuple[str, str], ...]:
    request = problem.request
    mode = graphs.effective_mode(request)
    return tuple(
        (
            phase,
            graphs.group_state(graphs.wanted(mode, phase), not graph_refusals(candidate, needs, active, lens, phase)),
        )
        for phase, lens in phase_lens(problem).items()
    )


def phase_lens(problem: Problem) -> Mapping[str, int]:
    """Return the most query tokens of one request, phase by phase."""
    request = problem.request
    lens = {"decode": 1, "verify": request.query_len.value, "mixed": request.max_query_len.value}
    return {phase: lens[phase] for phase in graphs.phases_of(request.query_len.value)}


def graph_refusals(
    candidate: Candidate, needs: Sequence[GroupNeed], active: frozenset[str], query_len: int, phase: str
) -> list[str]:
    """Return the reasons why a candidate's forward cannot be captured in a phase, empty if it can."""
    level = graphs.required_level(phase)
    # Limits of graphs with a cascade concern only the steps that have one. The others are captured as usual.
    active = active - {"cascade", "cascade=True"}
    texts = [offer.refusal(level) for offer in _effective(candidate, "graphs", active)]
    values: dict[str, Any] = {need.capability: need.value for need in needs} | {"query_len": query_len}
    for limit in candidate.capabilities.limits:
        if limit.when == "graphs" and limit.capability in values:
            refusal = limit.offer.refusal(values[limit.capability])
            texts.append(refusal and f"{limit.capability.replace('_', ' ')} in graphs: {refusal}")
    return [text for text in texts if text]


def cascade_state(problem: Problem, group: GroupRequest, candidate: Candidate, pair: Pair) -> str:
    """Return the cascade state of a group with a chosen candidate: captured, eager or none."""
    request = problem.request
    if not request.cascade.value or request.batch_invariant.value or not sees_all(group):
        return NONE
    needs = group_needs(problem, group, pair)
    active = conditions(needs, request.query_len.value, pair) | {"cascade"}
    if any(offer.refusal(True) for offer in _effective(candidate, "cascade", active)):
        return NONE
    inside = not any(
        offer.refusal(graphs.required_level("decode")) for offer in _effective(candidate, "graphs", active)
    )
    return (
        CAPTURED if inside and dict(_graph_states(problem, candidate, needs, active))["decode"] == CAPTURED else EAGER
    )


def cascade_refusal(problem: Problem, group: GroupRequest, candidate: Candidate, pair: Pair) -> str:
    """Return the reason why a backend with cascade does not use it for a group, or "" if it does."""
    request = problem.request
    wanted = request.cascade.value and not request.batch_invariant.value and sees_all(group)
    if not (wanted and candidate.capabilities.cascade.support):
        return ""
    active = conditions(group_needs(problem, group, pair), request.query_len.value, pair)
    need = Need(capability="cascade", value=True, origin=request.cascade.origin)
    return "; ".join(reason.text for reason in refusals_of(candidate.capabilities, need, active, "backend"))


def _loss(problem: Problem, states: Sequence[tuple[str, str]]) -> int:
    request = problem.request
    mode = graphs.effective_mode(request)
    return sum(graphs.wanted(mode, phase) == graphs.FULL and state != CAPTURED for phase, state in states)


def kv_reasons(problem: Problem, kind: str, candidate: Candidate) -> tuple[Reason, ...]:
    """Return the reasons why a cache spec cannot hold layers of a kind, empty if it may be chosen."""
    unusable = usability(candidate)
    request = problem.request
    asked = request.kv_specs.get(kind)
    reasons = list(unusable)
    if asked is not None and asked.value != candidate.name and problem.insists(f"cache.kv_spec.{kind}"):
        reasons.append(not_asked_for((asked.value,), asked.origin))
    if unusable:
        return tuple(reasons)
    offer, size, sharing = candidate.capabilities, request.block_size, request.prefix_caching
    if offer.state.support:
        reasons.append(reason_of("kv_kinds", f"needs {kind}, and it holds states, not blocks", f"model: {kind} layers"))
        return tuple(reasons)
    if problem.insists(model_key("kv_kind", kind)) and (text := offer.kv_kinds.refusal(kind)):
        reasons.append(reason_of("kv_kinds", text, f"model: {kind} layers"))
    cache_format, origin = cache_format_of(problem, kind)
    if text := offer.formats.refusal(cache_format):
        reasons.append(reason_of("formats", text, origin))
    if (
        isinstance(size.value, int)
        and problem.insists("cache.block_size")
        and (text := offer.block_sizes.refusal(size.value))
    ):
        reasons.append(reason_of("block_sizes", text, size.origin))
    must_share = sharing.value and sharing.explicit and problem.insists("cache.prefix_caching")
    if must_share and (text := offer.prefix_caching.refusal(True)):
        reasons.append(reason_of("prefix_caching", text, sharing.origin))
    return tuple(reasons)
