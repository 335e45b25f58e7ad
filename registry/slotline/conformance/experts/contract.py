"""L0 of experts plugins: descriptor, capabilities, factory, methods, refusals."""

from __future__ import annotations

from typing import Any

from slotline.registry.capability import GraphSupport
from slotline.registry.contracts import ELEMENTS, ExpertsCapabilities, ExpertsContext
from slotline.registry.descriptor import Kind
from slotline.testing.check import Run
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.experts import CONSTANTS, activations_of, dtypes_of, schemes_of
from slotline.testing.environments.linear import next_size
from slotline.testing.refusal_checks import UNKNOWN, beyond, register_part_refusals


def _context(run: Run) -> ExpertsContext:
    offer: Any = run.subject.capabilities
    scheme = next(iter(schemes_of(run.subject).values()))
    step = max(scheme.group[1], 1)
    return ExpertsContext(
        contract=1,
        scheme=scheme,
        experts=2,
        in_features=next_size(offer.in_features, 64, step),
        out_features=next_size(offer.out_features, 64, 2 * step),
        activation=activations_of(run.subject)[0],
        constants=CONSTANTS,
        dtype=dtypes_of(run.subject)[0],
        device=run.subject.device.type,
        max_tokens=16,
    )


register_contract_checks(KindContract(kind=Kind.EXPERTS, capabilities=ExpertsCapabilities, context=_context))
register_part_refusals(
    Kind.EXPERTS,
    {
        "devices": lambda _: ("cpu", "cuda", UNKNOWN),
        "dtypes": lambda _: ("float32", "bfloat16", "float16", UNKNOWN),
        "schemes": lambda _: (*ELEMENTS, UNKNOWN),
        "granularities": lambda _: ("tensor", "channel", "group", "block", UNKNOWN),
        "scale_groups": lambda _: (16, 32, 64, 128, 48, 7),
        "ragged": lambda _: (True,),
        "offsets": lambda _: (True,),
        "in_features": lambda _: (64, 63, 4096),
        "out_features": lambda _: (64, 63, 4096),
        "activations": lambda _: ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai", UNKNOWN),
        "bias": lambda _: (True,),
        "max_experts": lambda subject: beyond(subject, "max_experts"),
        "graphs": lambda _: tuple(GraphSupport),
        "batch_invariant": lambda _: (True,),
    },
)
