"""Logits processor `penalties`: presence, frequency and repetition penalties."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="penalties",
    summary="presence, frequency and repetition penalties",
    capabilities=LogitsProcessorCapabilities(
        parameters=("presence_penalty", "frequency_penalty", "repetition_penalty"),
        output_parameters=("presence_penalty", "frequency_penalty"),
        needs_history=True,
        speculation=Flag(True),
        keeps_finite=True,
        default=True,
        order=10,
        examples=(
            {"repetition_penalty": 1.3},
            {"presence_penalty": 0.5},
            {"frequency_penalty": -0.7},
            {"repetition_penalty": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.2},
        ),
        bad_examples=(
            {"repetition_penalty": 0.0},
            {"presence_penalty": 2.5},
            {"frequency_penalty": -3.0},
            {"presence_penalty": "much"},
        ),
        oracle="slotline.plugins.logits_processors.oracles:penalties",
    ),
    factory="slotline.plugins.logits_processors.penalties.processor:Penalties",
)
