"""Logits processor `min_p`: drops tokens that are less likely than a share of the most likely one's probability."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="min_p",
    summary="drops tokens that are unlikely beside the most likely one",
    capabilities=LogitsProcessorCapabilities(
        parameters=("min_p",),
        argmax_invariant=True,
        speculation=Flag(True),
        floors=True,
        default=True,
        order=900,
        examples=(
            {"min_p": 0.1},
            {"min_p": 0.3, "temperature": 0.5},
            {"min_p": 1.0, "temperature": 2.0},
        ),
        bad_examples=({"min_p": -0.1}, {"min_p": 1.5}, {"min_p": "some"}),
    ),
    factory="slotline.plugins.logits_processors.min_p.processor:MinP",
)
