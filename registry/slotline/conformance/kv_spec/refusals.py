"""Refusal of a cache spec's undeclared features by negotiation."""

from __future__ import annotations

from attrs import evolve

from slotline.conformance.kv_spec.contract import KINDS, SIZES, block_size_of, kind_of
from slotline.registry.capability import Align
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES
from slotline.registry.contracts.state import STATE_KINDS
from slotline.registry.descriptor import Kind
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Asked, PlanRequest, group_layers, group_states, negotiate
from slotline.registry.negotiation.codes import code_of
from slotline.testing.check import Case, Failed, Family, Level, NotApplicable, Run, check
from slotline.testing.environments.kv_spec import LATENT_KINDS, default_format, facts_of
from slotline.testing.environments.state_spec import (
    declared_kinds,
    holds_states,
    layers_of,
    refuse_states,
)
from slotline.testing.refusal_checks import (
    ANY_ATTENTION,
    UNKNOWN,
    candidate_of,
    expect_accepted,
    expect_refused,
    undeclared,
)
from slotline.testing.subject import Subject

FULL = "full"
"""Kind of the layers that a spec of states never holds."""


def base(subject: Subject, kind: str = "") -> PlanRequest:
    """Return a request for a layer of a declared kind, or of `kind`, that holds what the spec is for."""
    return _of_states(subject, kind) if holds_states(subject) else _of_blocks(subject, kind)


def _of_states(subject: Subject, kind: str = "") -> PlanRequest:
    return PlanRequest(
        device=subject.device,
        groups=(),
        state_groups=group_states(layers_of(kind or declared_kinds(subject)[0])),
        graphs=Asked("none", "the suite", True),
        prefix_caching=Asked(False, "the suite", True),
    )


def _of_blocks(subject: Subject, kind: str = "") -> PlanRequest:
    size = 16 if holds_states(subject) else block_size_of(subject)
    cache_format = default_format(subject)
    layer = AttentionLayer(
        name="model.layers.0.self_attn",
        index=0,
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        head_size_v=64,
        scale=0.125,
        kv_kind=kind or kind_of(subject),
    )
    return PlanRequest(
        device=subject.device,
        groups=group_layers(
            [
                evolve(
                    layer,
                    window=64 if layer.kv_kind == "sliding" else None,
                    chunk=64 if layer.kv_kind == "chunked" else None,
                    num_kv_heads=1 if layer.kv_kind in LATENT_KINDS else 2,
                    **facts_of(layer.kv_kind),
                )
            ]
        ),
        kv_dtype=Asked(cache_format, "the suite", True) if cache_format in FORMAT_DTYPES else Asked("auto"),
        block_size=Asked(size, "the suite", True),
        graphs=Asked("none", "the suite", True),
        prefix_caching=Asked(False, "the suite", True),
    )


@check(Kind.KV_SPEC, "kv_spec.negotiation.declared", Level.CONTRACT, cost=0.01)
def declared(run: Run) -> None:
    """A request for declared values ends in a plan that names the spec."""
    expect_accepted(run.subject, base(run.subject))


def undeclared_kinds(subject: Subject) -> list[Case]:
    """Return a case for some undeclared kinds of layers. A spec of states never holds full attention."""
    if not holds_states(subject):
        return [{"kind": kind} for kind in undeclared(subject, "kv_kinds", (*KINDS, UNKNOWN))]
    everything = subject.capabilities.kv_kinds.values is None
    kinds = [] if everything else undeclared(subject, "kv_kinds", (*STATE_KINDS, UNKNOWN))
    return [{"kind": kind} for kind in (*kinds, FULL)]


def undeclared_sizes(subject: Subject) -> list[Case]:
    """Return a case for each block size that is not declared.

    Raises:
        NotApplicable: if the spec holds states.
    """
    refuse_states(subject)
    return [{"size": size} for size in undeclared(subject, "block_sizes", (*SIZES, 3, 17, 24))]


def once_for_blocks(subject: Subject) -> list[Case]:
    """Return one case of a spec of blocks.

    Raises:
        NotApplicable: if the spec holds states.
    """
    refuse_states(subject)
    return [{}]


@check(
    Kind.KV_SPEC,
    "kv_spec.refuse.kv_kinds",
    Level.CONTRACT,
    family=Family.REFUSED,
    cases=undeclared_kinds,
    cost=0.01,
)
def kinds(run: Run) -> None:
    """Layers of a kind that is not declared are refused with N110."""
    request = base(run.subject, run["kind"])
    if holds_states(run.subject) and run["kind"] == FULL:
        named = {FULL: Asked(run.subject.name, "the suite", True)}
        request = evolve(_of_blocks(run.subject, FULL), kv_specs=named)
    expect_refused(run.subject, request, code_of("kv_kinds"), f"{run['kind']} layers")


@check(
    Kind.KV_SPEC,
    "kv_spec.refuse.block_sizes",
    Level.CONTRACT,
    family=Family.REFUSED,
    cases=undeclared_sizes,
    cost=0.01,
)
def sizes(run: Run) -> None:
    """A block size that is not declared is refused with N141."""
    request = evolve(base(run.subject), block_size=Asked(run["size"], "the suite", True))
    expect_refused(run.subject, request, code_of("block_sizes"), f"blocks of {run['size']} tokens")


@check(
    Kind.KV_SPEC,
    "kv_spec.refuse.state",
    Level.CONTRACT,
    family=Family.REFUSED,
    needs={"state": True},
    cost=0.01,
)
def states(run: Run) -> None:
    """Layers that keep a state are refused with N110 where the spec holds blocks."""
    expect_refused(run.subject, _of_states(run.subject, "mamba2"), code_of("kv_kinds"), "states")


@check(
    Kind.KV_SPEC,
    "kv_spec.refuse.prefix_caching",
    Level.CONTRACT,
    family=Family.REFUSED,
    needs={"prefix_caching": True},
    cost=0.01,
)
def prefix_caching(run: Run) -> None:
    """Prefix caching that was asked for by name is refused with N142 where blocks cannot be shared."""
    request = evolve(base(run.subject), prefix_caching=Asked(True, "the suite", True))
    expect_refused(run.subject, request, code_of("prefix_caching"), "prefix caching")


@check(
    Kind.KV_SPEC,
    "kv_spec.refuse.splittable",
    Level.CONTRACT,
    family=Family.REFUSED,
    needs={"splittable": True},
    cases=once_for_blocks,
    cost=0.01,
)
def splittable(run: Run) -> None:
    """A backend whose kernels need smaller blocks is not put over blocks that cannot be split."""
    request, size = base(run.subject), block_size_of(run.subject)
    if size == 1:
        raise NotApplicable("the declared block size has no divisor")
    kernel = next(number for number in range(1, size) if size % number == 0)
    offer = evolve(ANY_ATTENTION.capabilities, kernel_block_sizes=Align(exact=(kernel,)))
    attention = evolve(ANY_ATTENTION, capabilities=offer)
    try:
        negotiate(request, [attention], [candidate_of(run.subject)])
    except NegotiationError:
        return
    raise Failed(f"blocks of {size} tokens were split into {kernel}, and splittable is not declared")
