"""A model family of somebody else's, with a modality of its own: sounds are lists of numbers, one embedding for each.

One attention layer without positions and an output projection, all from a seed. In a prompt a sound stands between two
edge tokens. Nothing here knows slotline's plugins; the tests load it as an inline plugin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slotline.registry.capability import Set
from slotline.registry.contracts import (
    AttentionLayer,
    Modality,
    ModelContext,
    ModelFacts,
    ModelFamilyCapabilities,
    ProcessedItem,
)
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import RequestError

VOCAB_SIZE, HIDDEN_SIZE, HEADS = 64, 32, 2
SOUND, EDGE = 5, 6
LAYER = AttentionLayer(
    name="attention", index=0, num_heads=HEADS, num_kv_heads=HEADS, head_size=16, head_size_v=16, scale=0.5
)


class SoundModel:
    """Implements `MultimodalModel`."""

    notes: tuple[str, ...] = ()

    def __init__(self, context: ModelContext) -> None:
        self.facts = context.facts
        generator = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.tokens, self.head = weight(VOCAB_SIZE, HIDDEN_SIZE), weight(HIDDEN_SIZE, VOCAB_SIZE)
        self.qkv, self.ear = weight(3, HIDDEN_SIZE, HIDDEN_SIZE) / 4, weight(1, HIDDEN_SIZE)

    def process(self, modality: str, item: Any) -> ProcessedItem:
        if not isinstance(item, Sequence) or not item:
            raise RequestError(f"sound={item!r} is no list of numbers", fix="give at least one")
        samples = torch.tensor(item, dtype=torch.float32)
        return ProcessedItem(modality=modality, token_ids=[EDGE, *[SOUND] * len(item), EDGE], inputs={"s": samples})

    def example(self, modality: str) -> ProcessedItem:
        return self.process(modality, [0.0] * 8)

    def encode(self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        return [item["s"][:, None] @ self.ear for item in items]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.tokens[input_ids]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Any,
        wanted: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        query, key, value = (hidden @ self.qkv).view(3, -1, HEADS, 16)
        hidden = hidden + attend(LAYER, query, key, value, None).flatten(1)
        return hidden if wanted is None else hidden[wanted]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.head

    def reload_weights(self, path: Path | None = None) -> None:
        """They come from the seed."""


class SoundFamily:
    """Implements `ModelFamily`."""

    def __init__(self, context: object = None) -> None:
        """Nothing to prepare."""

    def inspect(self, path: Path) -> ModelFacts:
        return ModelFacts(
            architecture="SoundModel",
            path=path,
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            max_model_len=128,
            dtype="float32",
            layers=(LAYER,),
            num_parameters=0,
            modalities=(Modality(name="sound", placeholder_token_id=SOUND),),
        )

    def capture_refusal(self, facts: ModelFacts, device: str, dtype: str) -> str | None:
        return "its weights stay in host memory"

    def load(self, context: ModelContext) -> SoundModel:
        return SoundModel(context)


def checkpoint(path: Path) -> Path:
    """A folder that the family serves."""
    (path / "config.json").write_text(json.dumps({"architectures": ["SoundModel"]}))
    return path


descriptor: Descriptor[ModelFamilyCapabilities] = Descriptor(
    kind=Kind.MODEL_FAMILY,
    name="sound",
    capabilities=ModelFamilyCapabilities(architectures=Set(("SoundModel",))),
    factory=SoundFamily,
    summary="a test's model that hears",
)
