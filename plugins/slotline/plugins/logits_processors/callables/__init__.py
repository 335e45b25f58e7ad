"""Logits processor `callables`: functions that a request brings along, one by one on the host's thread."""

from typing import Any

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind


def _push(output_token_ids: list[int], logits: Any) -> Any:
    logits[len(output_token_ids) % 32] += 5.0
    return logits


def _push_first_of_prompt(prompt_token_ids: list[int], output_token_ids: list[int], logits: Any) -> Any:
    return logits.index_fill(0, logits.argmax(), float(prompt_token_ids[0]))


descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="callables",
    summary="functions of a single request; slow",
    capabilities=LogitsProcessorCapabilities(
        parameters=("logits_processors",),
        needs_history=True,
        speculation=Flag(True),
        default=True,
        order=90,
        examples=({"logits_processors": [_push]}, {"logits_processors": [_push, _push_first_of_prompt]}),
        bad_examples=({"logits_processors": ["push"]}, {"logits_processors": [len]}),
    ),
    factory="slotline.plugins.logits_processors.callables.processor:Callables",
)
