"""Logits processor `dry`: penalises tokens that would go on repeating a passage, the more the longer it is."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="dry",
    summary="penalises tokens that would go on repeating a passage, the more the longer it is",
    capabilities=LogitsProcessorCapabilities(
        parameters=(
            "dry_multiplier",
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breaker_ids",
        ),
        needs_history=True,
        speculation=Flag(True),
        order=15,
        examples=(
            {"dry_multiplier": 0.8, "dry_allowed_length": 1},
            {"dry_multiplier": 2.0, "dry_base": 1.2, "dry_allowed_length": 1, "dry_sequence_breaker_ids": [4, 9]},
            {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_penalty_last_n": 20},
        ),
        bad_examples=(
            {"dry_multiplier": -1.0},
            {"dry_multiplier": 1.0, "dry_base": 0.5},
            {"dry_multiplier": 1.0, "dry_allowed_length": 0},
            {"dry_multiplier": 1.0, "dry_allowed_length": 10**30},
            {"dry_multiplier": 10**400},
            {"dry_multiplier": 1.0, "dry_penalty_last_n": -2},
            {"dry_multiplier": 1.0, "dry_sequence_breaker_ids": ["."]},
        ),
    ),
    factory="slotline.plugins.logits_processors.dry.processor:Dry",
)
