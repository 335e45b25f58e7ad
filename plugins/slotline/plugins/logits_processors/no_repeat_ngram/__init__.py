"""Logits processor `no_repeat_ngram`: no sequence of n tokens twice."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="no_repeat_ngram",
    summary="no sequence of so many tokens stands twice in prompt and output",
    capabilities=LogitsProcessorCapabilities(
        parameters=("no_repeat_ngram_size",),
        needs_history=True,
        speculation=Flag(True),
        order=60,
        examples=({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 3}),
        bad_examples=(
            {"no_repeat_ngram_size": -1},
            {"no_repeat_ngram_size": 1.5},
            {"no_repeat_ngram_size": "two"},
            {"no_repeat_ngram_size": 10**30},
        ),
    ),
    factory="slotline.plugins.logits_processors.no_repeat_ngram.processor:NoRepeatNGram",
)
