"""Logits processor `guidance`: classifier-free guidance, away from what a negative prompt makes likely."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="guidance",
    summary="moves logits away from those behind a negative prompt",
    capabilities=LogitsProcessorCapabilities(
        parameters=("guidance_scale", "negative_prompt", "negative_prompt_token_ids"),
        speculation=Flag(True),
        companions=True,
        default=True,
        order=0,
        examples=(
            {"guidance_scale": 1.5},
            {"guidance_scale": 3.0, "negative_prompt_token_ids": [4, 7]},
            {"guidance_scale": 0.5, "negative_prompt": "def"},
        ),
        bad_examples=({"guidance_scale": -1.0}, {"guidance_scale": "much"}),
    ),
    factory="slotline.plugins.logits_processors.guidance.processor:Guidance",
)
