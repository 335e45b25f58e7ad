"""Logits processor `bad_words`: words, as sequences of tokens, that never come out."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="bad_words",
    summary="bans the token that would complete a bad word",
    capabilities=LogitsProcessorCapabilities(
        parameters=("bad_words", "bad_words_token_ids"),
        needs_history=True,
        speculation=Flag(True),
        default=True,
        order=50,
        examples=(
            {"bad_words_token_ids": [[3], [9]]},
            {"bad_words_token_ids": [[token, 7] for token in range(32)]},
            {"bad_words_token_ids": [[5, 6, 7], [30], *([a, b, 8] for a in range(32) for b in range(32))]},
        ),
        bad_examples=(
            {"bad_words_token_ids": [[3, 1_000_000_000]]},
            {"bad_words_token_ids": [[]]},
            {"bad_words_token_ids": [3]},
            {"bad_words": [" "]},
        ),
    ),
    factory="slotline.plugins.logits_processors.bad_words.processor:BadWords",
)
