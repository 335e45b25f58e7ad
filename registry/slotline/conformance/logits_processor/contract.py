"""L0 of logits processors: descriptor, capabilities, factory, methods, unknown parameters."""

from __future__ import annotations

from slotline.core import SamplingParams
from slotline.registry.contracts.logits_processor import (
    LogitsProcessorCapabilities,
    LogitsProcessorContext,
)
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.contract_checks import UNKNOWN, KindContract, register_contract_checks


def _context(run: Run) -> LogitsProcessorContext:
    return LogitsProcessorContext(
        contract=1,
        vocab_size=32,
        eos_token_ids=(1,),
        max_requests=4,
        max_model_len=64,
        device=run.subject.device.type,
    )


register_contract_checks(
    KindContract(
        kind=Kind.LOGITS_PROCESSOR,
        capabilities=LogitsProcessorCapabilities,
        context=_context,
    )
)


@check(Kind.LOGITS_PROCESSOR, "logits_processor.contract.unknown_parameters", Level.CONTRACT)
def unknown_parameters(run: Run) -> None:
    """Parameters of other processors and of later versions are passed over."""
    processor = run.subject.build(_context(run))
    params = {**SamplingParams().as_mapping(), UNKNOWN: 1}
    processor.validate(params)
    working = processor.admit(0, params, [3, 4, 5])
    if not isinstance(working, bool):
        raise Failed(f"admit returned {working!r}; it says whether there is work, True or False")
    if working:
        processor.release(0)
