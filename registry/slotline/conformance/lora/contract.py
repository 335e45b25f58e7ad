"""L0 of LoRA plugins: descriptor, capabilities, factory, methods."""

from __future__ import annotations

from slotline.registry.contracts.lora import LoraCapabilities, LoraContext
from slotline.registry.descriptor import Kind
from slotline.testing.check import Run
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.lora import dtypes_of, modules_of


def _context(run: Run) -> LoraContext:
    offer = run.subject.capabilities
    return LoraContext(
        contract=1,
        modules=modules_of(run.subject),
        max_adapters=min(2, offer.max_adapters.limit or 2),
        max_rank=min(4, offer.max_rank.limit or 4),
        max_tokens=16,
        device=run.subject.device.type,
        dtype=dtypes_of(run.subject)[0],
    )


register_contract_checks(KindContract(kind=Kind.LORA, capabilities=LoraCapabilities, context=_context))
