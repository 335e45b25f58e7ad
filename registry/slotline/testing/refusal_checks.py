"""Checks of refusals: undeclared features are refused when a plan is made, with their code.

Attention backends and cache specs take part in `negotiate`. The other kinds are compared by `part_reasons`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.attention import AttentionCapabilities
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.contracts.state import StateCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Candidate, Need, PlanRequest, negotiate, part_reasons
from slotline.registry.negotiation.codes import code_of
from slotline.testing.check import Case, Failed, Family, Level, NotApplicable, Run, check
from slotline.testing.subject import Subject

UNKNOWN = "slotline_unknown_name"
MOST_VALUES = 3
"""Undeclared values of one capability that are tried."""

ANY_ATTENTION = Candidate(
    descriptor=Descriptor(
        kind=Kind.ATTENTION,
        name="takes_anything",
        capabilities=AttentionCapabilities(
            devices=Set(None),
            dtypes=Set(None),
            different_value_head=Flag(True),
            sliding_window=Flag(True),
            chunked=Flag(True),
            mla=Flag(True),
            index_topk=Flag(True),
            layer_inputs=Set(None),
            cache_formats=Set(None),
        ),
        factory="nowhere:nothing",
    ),
    distribution="the suite",
)
"""A backend that stands in no cache spec's way."""


def any_kv_spec(formats: Set[str]) -> Candidate:
    """Return a cache spec that lays out these formats and stands in no backend's way."""
    return Candidate(
        descriptor=Descriptor(
            kind=Kind.KV_SPEC,
            name="holds_anything",
            capabilities=KVSpecCapabilities(kv_kinds=Set(None), exact_kinds=Set(None), formats=formats),
            factory="nowhere:nothing",
        ),
        distribution="the suite",
    )


ANY_KV_SPEC = any_kv_spec(Set(None))
"""A cache spec of any format that stands in no backend's way."""

ANY_STATE = Candidate(
    descriptor=Descriptor(
        kind=Kind.STATE,
        name="advances_anything",
        capabilities=StateCapabilities(
            devices=Set(None), state_kinds=Set(None), dtypes=Set(None), rollback=Flag(True), checkpoints=Flag(True)
        ),
        factory="nowhere:nothing",
    ),
    distribution="the suite",
)
"""A state backend that stands in no cache spec's way."""


def candidate_of(subject: Subject) -> Candidate:
    """Return the plugin under test as a candidate of negotiation."""
    return Candidate(
        descriptor=subject.descriptor,
        capabilities=subject.capabilities,
        contract=subject.contract,
        distribution=subject.distribution or "under test",
        version=subject.version,
    )


def candidates_with(subject: Subject) -> tuple[list[Candidate], list[Candidate], list[Candidate]]:
    """Return attention backends, cache specs and state backends: the plugin in its kind, stand-ins in the others."""
    own = [candidate_of(subject)]
    if subject.kind is Kind.ATTENTION:
        spec = subject.companion
        return own, [ANY_KV_SPEC if spec is None else any_kv_spec(spec.capabilities.formats)], [ANY_STATE]
    return [ANY_ATTENTION], own, [ANY_STATE]


def expect_accepted(subject: Subject, request: PlanRequest) -> None:
    """Raise `Failed` unless a request leads to a plan with the plugin."""
    try:
        plan = negotiate(request, *candidates_with(subject))
    except NegotiationError as error:
        raise Failed(f"what is declared was refused: {error}") from error
    if subject.name not in plan.explain():
        raise Failed(f"the plan does not name {subject.name}: {plan.explain()}")


def expect_refused(subject: Subject, request: PlanRequest, code: str, what: str) -> None:
    """Raise `Failed` unless negotiation refuses a request because of the plugin, with a code, naming the plugin."""
    try:
        negotiate(request, *candidates_with(subject))
    except NegotiationError as error:
        groups = () if error.failure is None else error.failure.groups
        rejected = [item for group in groups for item in group.rejected if item.name == subject.name]
        reasons = [reason for item in rejected for reason in item.reasons]
        if code not in {reason.code for reason in reasons}:
            found = "; ".join(f"{reason.code} {reason.text}" for reason in reasons) or "nothing"
            raise Failed(f"{what}: expected {code} against {subject.name}, found {found}") from error
        if subject.name not in str(error):
            raise Failed(f"{what}: the error does not name {subject.name}: {error}") from error
    else:
        raise Failed(f"{what} is not declared, and negotiation took {subject.name} for it")


def undeclared(subject: Subject, capability: str, values: Iterable[Any]) -> list[Any]:
    """Return some of `values` that the plugin does not declare, all of them if the run is exhaustive.

    Raises:
        NotApplicable: if it declares them all.
    """
    offer = getattr(subject.capabilities, capability)
    found = [value for value in dict.fromkeys(values) if offer.refusal(value) is not None]
    if not found:
        raise NotApplicable(f"declared: {capability.replace('_', ' ')} {offer.describe()}")
    return found if subject.exhaustive else found[:MOST_VALUES]


def beyond(subject: Subject, capability: str) -> list[int]:
    """Return numbers above an upper limit, none if there is no limit."""
    limit = getattr(subject.capabilities, capability).limit
    return [] if limit is None else [limit + 1, 4 * limit + 3]


def register_part_refusals(
    kind: Kind, values: Mapping[str, Callable[[Subject], Sequence[Any]]], codes: Mapping[str, str] | None = None
) -> None:
    """Register ``<kind>.refuse.<capability>`` for a kind without groups of layers.

    Args:
        kind: kind of plugin.
        values: capability -> values. The undeclared ones are tried.
        codes: codes of capabilities that have none of their own.
    """
    for capability, offered in values.items():
        register = check(
            kind,
            f"{kind.value}.refuse.{capability}",
            Level.CONTRACT,
            family=Family.REFUSED,
            cases=_cases(capability, offered),
            cost=0.001,
        )
        register(_refusal_of(capability, offered, (codes or {}).get(capability, code_of(capability))))
    register = check(kind, f"{kind.value}.refuse.unknown", Level.CONTRACT, family=Family.REFUSED, cost=0.001)
    register(_refusal_of(UNKNOWN, lambda _: [True], code_of(UNKNOWN)))


def _cases(capability: str, offered: Callable[[Subject], Sequence[Any]]) -> Callable[[Subject], Iterable[Case]]:
    return lambda subject: [{"value": text_of(value)} for value in undeclared(subject, capability, offered(subject))]


def text_of(value: Any) -> Any:
    """Return a value as shown in a report: pairs as ``a/b``, levels by name."""
    return "/".join(value) if isinstance(value, tuple) else getattr(value, "name", value)


def _refusal_of(capability: str, offered: Callable[[Subject], Sequence[Any]], code: str) -> Callable[[Run], None]:
    def refused(run: Run) -> None:
        wanted = run.case.get("value", True)
        value = next(item for item in offered(run.subject) if text_of(item) == wanted)
        need = Need(capability=capability, value=value, origin="the suite")
        reasons = part_reasons(run.subject.capabilities, [need])
        if [reason.code for reason in reasons] != [code]:
            found = "; ".join(f"{reason.code} {reason.text}" for reason in reasons) or "nothing"
            raise Failed(f"{capability} {wanted} is not declared: expected {code}, found {found}")
        if reasons[0].origin != "the suite":
            raise Failed(f"the reason does not say who needs it: {reasons[0]}")

    refused.__doc__ = f"What is not declared of {capability.replace('_', ' ')} is refused with {code}."
    return refused
