"""What a cache spec does not declare is refused by negotiation."""

from __future__ import annotations

from attrs import evolve

from slotline.conformance.kv_spec.contract import KINDS, SIZES, block_size_of, kind_of
from slotline.registry.capability import Align
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.descriptor import Kind
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Asked, PlanRequest, group_layers, negotiate
from slotline.registry.negotiation.codes import code_of
from slotline.testing.check import Failed, Family, Level, NotApplicable, Run, check
from slotline.testing.refusal_checks import (
    ANY_ATTENTION,
    UNKNOWN,
    candidate_of,
    expect_accepted,
    expect_refused,
    undeclared,
)
from slotline.testing.subject import Subject


def base(subject: Subject, kind: str = "") -> PlanRequest:
    """A request for one layer of a declared kind, or of `kind`."""
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
                    mla=layer.kv_kind == "mla",
                    num_kv_heads=1 if layer.kv_kind == "mla" else 2,
                )
            ]
        ),
        block_size=Asked(block_size_of(subject), "the suite", True),
        graphs=Asked("none", "the suite", True),
        prefix_caching=Asked(False, "the suite", True),
    )


@check(Kind.KV_SPEC, "kv_spec.negotiation.declared", Level.CONTRACT, cost=0.01)
def declared(run: Run) -> None:
    """A request for declared values ends in a plan that names the spec."""
    expect_accepted(run.subject, base(run.subject))


@check(
    Kind.KV_SPEC,
    "kv_spec.refuse.kv_kinds",
    Level.CONTRACT,
    family=Family.REFUSED,
    cases=lambda subject: [{"kind": kind} for kind in undeclared(subject, "kv_kinds", (*KINDS, UNKNOWN))],
    cost=0.01,
)
def kinds(run: Run) -> None:
    """Layers of a kind that is not declared are refused with N110."""
    expect_refused(run.subject, base(run.subject, run["kind"]), code_of("kv_kinds"), f"{run['kind']} layers")


@check(
    Kind.KV_SPEC,
    "kv_spec.refuse.block_sizes",
    Level.CONTRACT,
    family=Family.REFUSED,
    cases=lambda subject: [{"size": size} for size in undeclared(subject, "block_sizes", (*SIZES, 3, 17, 24))],
    cost=0.01,
)
def sizes(run: Run) -> None:
    """A block size that is not declared is refused with N141."""
    request = evolve(base(run.subject), block_size=Asked(run["size"], "the suite", True))
    expect_refused(run.subject, request, code_of("block_sizes"), f"blocks of {run['size']} tokens")


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
