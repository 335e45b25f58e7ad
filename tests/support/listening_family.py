"""A model family of somebody else's that listens: sounds of any length, read by a cross-attention layer.

The model of sound_family with one more layer, whose keys come from a sound's embeddings. The tests load it as an inline
plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sound_family
import torch
from attrs import evolve
from sound_family import HEADS, HIDDEN_SIZE, SoundModel

from slotline.registry.capability import Set
from slotline.registry.contracts import Modality, ModelContext, ModelFacts, ModelFamilyCapabilities, ProcessedItem
from slotline.registry.descriptor import Descriptor, Kind

MAX_ENCODER_LEN = 40
SELF = sound_family.LAYER
CROSS = evolve(SELF, name="listening", index=1, attention_type="cross", kv_kind="cross")


class ListeningModel(SoundModel):
    """Implements `MultimodalModel`."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        generator = torch.Generator().manual_seed(2)
        self.cross = torch.randn((3, HIDDEN_SIZE, HIDDEN_SIZE), generator=generator) / 4

    def process(self, modality: str, item: Any) -> ProcessedItem:
        return ProcessedItem(modality=modality, token_ids=[-1] * len(item), inputs={"s": torch.tensor(item).sin()})

    def example(self, modality: str) -> ProcessedItem:
        return self.process(modality, [0.0] * MAX_ENCODER_LEN)

    def encode(self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        return [torch.outer(item["s"], self.ear[0]) for item in items]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Any,
        wanted: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        encoder_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heard = torch.zeros(0, HIDDEN_SIZE) if encoder_states is None else encoder_states
        hidden = self.embed(input_ids)
        query, key, value = (hidden @ self.qkv).view(3, -1, HEADS, 16)
        hidden = hidden + attend(SELF, query, key, value, None).flatten(1)
        query, (key, value) = hidden @ self.cross[0], heard @ self.cross[1:]
        query, key, value = (part.view(-1, HEADS, 16) for part in (query, key, value))
        hidden = hidden + attend(CROSS, query, key, value, None).flatten(1)
        return hidden if wanted is None else hidden[wanted]


class ListeningFamily(sound_family.SoundFamily):
    """Implements `ModelFamily`."""

    def inspect(self, path: Path) -> ModelFacts:
        return evolve(
            super().inspect(path),
            layers=(SELF, CROSS),
            modalities=(Modality(name="sound", placeholder_token_id=-1, cross=True),),
            max_encoder_len=MAX_ENCODER_LEN,
        )

    def load(self, context: ModelContext) -> ListeningModel:
        return ListeningModel(context)


descriptor: Descriptor[ModelFamilyCapabilities] = Descriptor(
    kind=Kind.MODEL_FAMILY,
    name="listening",
    capabilities=ModelFamilyCapabilities(architectures=Set(("SoundModel",))),
    factory=ListeningFamily,
    summary="a test's model that listens",
)
