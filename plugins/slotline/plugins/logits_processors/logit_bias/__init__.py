"""Logits processor `logit_bias`: adds a number to the logits of chosen tokens."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="logit_bias",
    summary="adds a number to the logits of chosen tokens",
    capabilities=LogitsProcessorCapabilities(
        parameters=("logit_bias",), speculation=Flag(True), default=True, order=20
    ),
    factory="slotline.plugins.logits_processors.logit_bias.processor:LogitBias",
)
