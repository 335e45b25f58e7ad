"""L0 of scheduler policies: descriptor, capabilities, factory, methods, refusals."""

from __future__ import annotations

from slotline.registry.contracts import SchedulerPolicyCapabilities, SchedulerPolicyContext
from slotline.registry.descriptor import Kind
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.refusal_checks import register_part_refusals

register_contract_checks(
    KindContract(
        kind=Kind.SCHEDULER_POLICY,
        capabilities=SchedulerPolicyCapabilities,
        context=lambda _run: SchedulerPolicyContext(
            contract=1, max_requests=4, max_batched_tokens=256, max_model_len=512
        ),
    )
)
register_part_refusals(Kind.SCHEDULER_POLICY, {"ranks": lambda _: (True,)})
