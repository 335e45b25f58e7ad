"""Logits processor `logit_bias`: adds a number to the logits of chosen tokens."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="logit_bias",
    summary="adds a number to the logits of chosen tokens",
    capabilities=LogitsProcessorCapabilities(
        parameters=("logit_bias",),
        speculation=Flag(True),
        keeps_finite=True,
        default=True,
        order=20,
        examples=({"logit_bias": {3: 5.0, 7: -100.0}}, {"logit_bias": {31: 0.5}}),
        bad_examples=({"logit_bias": {1_000_000_000: 1.0}}, {"logit_bias": {"3": 1.0}}, {"logit_bias": {3: 101.0}}),
        oracle="slotline.plugins.logits_processors.oracles:logit_bias",
    ),
    factory="slotline.plugins.logits_processors.logit_bias.processor:LogitBias",
)
