"""Logits processor `min_tokens`: no stop token before a minimum number of output tokens."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="min_tokens",
    summary="no stop token before so many output tokens",
    capabilities=LogitsProcessorCapabilities(
        parameters=("min_tokens",),
        speculation=Flag(True),
        default=True,
        order=30,
        examples=({"min_tokens": 6}, {"min_tokens": 12, "stop_token_ids": [5, 9], "ignore_eos": True}),
        bad_examples=({"min_tokens": -1}, {"min_tokens": 1.5}),
    ),
    factory="slotline.plugins.logits_processors.min_tokens.processor:MinTokens",
)
