"""Logits processor `xtc`: excludes top choices, all likely tokens but the least likely of them, now and then."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="xtc",
    summary="now and then excludes all likely tokens but the least likely of them",
    capabilities=LogitsProcessorCapabilities(
        parameters=("xtc_probability", "xtc_threshold"),
        speculation=Flag(True),
        order=80,
        examples=(
            {"xtc_probability": 1.0, "xtc_threshold": 0.05, "seed": 3},
            {"xtc_probability": 0.7, "xtc_threshold": 0.01, "seed": 4},
        ),
        bad_examples=(
            {"xtc_probability": 1.5},
            {"xtc_probability": 0.5, "xtc_threshold": -0.1},
            {"xtc_probability": "often"},
        ),
    ),
    factory="slotline.plugins.logits_processors.xtc.processor:Xtc",
)
