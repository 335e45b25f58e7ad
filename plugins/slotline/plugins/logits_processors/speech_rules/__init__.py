"""Logits processor `speech_rules`: which tokens a transcript may have, and where its timestamps stand."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="speech_rules",
    summary="tokens that Whisper leaves out of transcripts, and its rules for timestamps",
    capabilities=LogitsProcessorCapabilities(
        parameters=("speech_rules",),
        output_parameters=("speech_rules",),
        needs_history=True,
        speculation=Flag(True),
        default=True,
        order=70,
        examples=(
            {"speech_rules": {"suppress": [3, 4, 5], "begin_suppress": [7]}},
            {"speech_rules": {"first_timestamp": 12, "end": 9}},
            {"speech_rules": {"first_timestamp": 12, "end": 9, "most_initial": 2, "suppress": [1]}},
        ),
        bad_examples=(
            {"speech_rules": 3},
            {"speech_rules": {"supress": [3]}},
            {"speech_rules": {"suppress": [-1]}},
            {"speech_rules": {"suppress": [10**30]}},
            {"speech_rules": {"first_timestamp": "a", "end": 9}},
            {"speech_rules": {"first_timestamp": 12}},
            {"speech_rules": {"first_timestamp": 0, "end": 9}},
        ),
    ),
    factory="slotline.plugins.logits_processors.speech_rules.processor:SpeechRules",
)
