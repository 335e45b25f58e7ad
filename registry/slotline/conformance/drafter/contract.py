"""L0 of drafters: descriptor, capabilities, factory, methods."""

from __future__ import annotations

from slotline.registry.contracts.drafter import DrafterCapabilities, DrafterContext
from slotline.registry.descriptor import Kind
from slotline.testing.check import Run
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.drafter import draft_lengths, with_engine_parts


def _context(run: Run) -> DrafterContext:
    context = DrafterContext(
        contract=1,
        num_tokens=draft_lengths(run.subject)[0],
        vocab_size=32,
        hidden_size=16,
        max_requests=4,
        max_model_len=64,
        device=run.subject.device.type,
        dtype="float32",
    )
    return with_engine_parts(run.subject, context)


register_contract_checks(KindContract(kind=Kind.DRAFTER, capabilities=DrafterCapabilities, context=_context))
