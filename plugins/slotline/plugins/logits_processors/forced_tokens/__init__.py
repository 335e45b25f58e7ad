"""Logits processor `forced_tokens`: the first and the last token of an output, as encoder-decoder models want them."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="forced_tokens",
    summary="the token after a prompt of one token, and the last token of an output that is as long as it may be",
    capabilities=LogitsProcessorCapabilities(
        parameters=("forced_bos_token_id", "forced_eos_token_id"),
        speculation=Flag(True),
        default=True,
        order=85,
        examples=({"forced_bos_token_id": 7, "forced_eos_token_id": 5, "max_tokens": 4},),
        bad_examples=(
            {"forced_bos_token_id": -1},
            {"forced_eos_token_id": 1.5},
            {"forced_bos_token_id": "a"},
            {"forced_eos_token_id": 10**30},
        ),
    ),
    factory="slotline.plugins.logits_processors.forced_tokens.processor:ForcedTokens",
)
