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
        needs_history=True,
        speculation=Flag(True),
        default=True,
        order=10,
    ),
    factory="slotline.plugins.logits_processors.penalties.processor:Penalties",
)
