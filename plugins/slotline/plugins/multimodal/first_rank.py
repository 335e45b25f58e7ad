"""Encoders over stages of ranks: the first rank encodes, and tells the others which items could not be encoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field

from slotline.builder.communicators import HostLink
from slotline.core.batch.model_inputs import ModelInputs
from slotline.plugins.multimodal.embeds import StepEmbeds
from slotline.plugins.multimodal.encoder_runner import EncoderRunner
from slotline.plugins.multimodal.features import Feature
from slotline.plugins.multimodal.item_scheduler import StepItems
from slotline.registry.errors import ModelError


@define(eq=False)
class FirstRankEncoder(EncoderRunner):
    """Encoder of the first rank, or its record on another one.

    Attributes:
        link: from the first rank to the others.
    """

    link: HostLink = field(kw_only=True)

    def run(self, items: StepItems) -> dict[str, Exception]:
        """Encode the items of a step, or be told of it. See `EncoderRunner.run`."""
        if self.link.sends:
            failed = EncoderRunner.run(self, items)
            if items.encode:
                self.link.send({mm_hash: f"{type(error).__name__}: {error}" for mm_hash, error in failed.items()})
            return failed
        for mm_hash in items.dropped:
            del self.outputs[mm_hash]
        told = {} if not items.encode else self.link.receive()
        for feature in items.encode:
            if feature.mm_hash not in told:
                self.outputs[feature.mm_hash] = torch.empty(0)
        return {mm_hash: ModelError(f"the first rank could not encode it: {text}") for mm_hash, text in told.items()}

    def of_step(self, inputs: ModelInputs, features: Sequence[tuple[int, Feature]]) -> StepEmbeds:
        """Return what was encoded for a step, which the first rank alone needs."""
        if self.link.sends:
            return EncoderRunner.of_step(self, inputs, features)
        return StepEmbeds(None, None, lambda: None)

    def profile(self, capacity: int, max_tokens_per_step: int) -> torch.Tensor:
        """Encode as much as a step may, on the first rank. See `EncoderRunner.profile`."""
        if self.link.sends:
            return EncoderRunner.profile(self, capacity, max_tokens_per_step)
        return torch.empty(0)
