"""Logits processor `allowed_token_ids`: bans every token but the chosen ones."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="allowed_token_ids",
    summary="bans every token but the chosen ones",
    capabilities=LogitsProcessorCapabilities(
        parameters=("allowed_token_ids",),
        speculation=Flag(True),
        default=True,
        order=40,
        examples=({"allowed_token_ids": [3, 9, 30]}, {"allowed_token_ids": [31]}),
        bad_examples=({"allowed_token_ids": []}, {"allowed_token_ids": [1_000_000_000]}, {"allowed_token_ids": ["3"]}),
        oracle="slotline.plugins.logits_processors.oracles:allowed_token_ids",
    ),
    factory="slotline.plugins.logits_processors.allowed_token_ids.processor:AllowedTokenIds",
)
