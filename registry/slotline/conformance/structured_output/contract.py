"""L0 of structured-output plugins: descriptor, capabilities, factory, methods."""

from __future__ import annotations

from slotline.registry.contracts.structured_output import (
    StructuredOutputCapabilities,
    StructuredOutputContext,
)
from slotline.registry.descriptor import Kind
from slotline.testing.check import Run
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.structured_output import context, tokenizer


def _context(run: Run) -> StructuredOutputContext:
    return context(len(tokenizer()))


register_contract_checks(
    KindContract(
        kind=Kind.STRUCTURED_OUTPUT,
        capabilities=StructuredOutputCapabilities,
        context=_context,
    )
)
