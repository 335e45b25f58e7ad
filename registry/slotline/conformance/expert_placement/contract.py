"""L0 of expert placements: descriptor, capabilities, factory, methods, refusals."""

from __future__ import annotations

from slotline.registry.contracts import ExpertPlacementCapabilities, ExpertPlacementContext
from slotline.registry.descriptor import Kind
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.refusal_checks import beyond, register_part_refusals

register_contract_checks(
    KindContract(
        kind=Kind.EXPERT_PLACEMENT,
        capabilities=ExpertPlacementCapabilities,
        context=lambda _run: ExpertPlacementContext(contract=1, ranks=2),
    )
)
register_part_refusals(
    Kind.EXPERT_PLACEMENT,
    {"max_ranks": lambda subject: beyond(subject, "max_ranks"), "redundant": lambda _: (True,)},
)
