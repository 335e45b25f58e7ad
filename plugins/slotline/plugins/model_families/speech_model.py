"""The model family for speech: Whisper's encoder runs once for a recording, its decoder token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import slotline.plugins.model_families.lighter_imports  # noqa: F401

# isort: split
from slotline.plugins.model_families import (
    checkpoint,
    weight_sizes,
)
from slotline.plugins.model_families.audio_processing import AudioProcessing
from slotline.plugins.model_families.encoder_decoder import EncoderDecoderModel, look_at
from slotline.plugins.model_families.speech import ARCHITECTURES
from slotline.registry.contracts.family_example import FamilyExample
from slotline.registry.contracts.model_family import Modality, ModelContext, ModelFacts, ProcessedItem, Shard

NO_TOKEN = -1
TIMESTAMPS = "no_timestamps_token_id"
"""What generation_config.json has if it says how to transcribe."""


class TransformersSpeech:
    """Family of every model of `speech.ARCHITECTURES`. It keeps no state, so one instance may load many models."""

    def __init__(self, context: object = None) -> None:
        """Do nothing, because `load` gets its context later."""

    def inspect(self, path: Path, *, quantized: bool = False, shard: Shard | None = None) -> ModelFacts:
        """See `slotline.registry.contracts.model_family.ModelFamily.inspect`."""
        found = checkpoint.read(Path(path), ARCHITECTURES)
        weight_sizes.require_weights(found)
        config = found.config
        return ModelFacts(
            architecture=found.architecture,
            path=found.path,
            vocab_size=int(config.vocab_size),
            hidden_size=int(config.d_model),
            max_model_len=int(config.max_target_positions),
            dtype=found.dtype,
            eos_token_ids=found.eos_token_ids,
            tasks=("generate", "transcription") if TIMESTAMPS in found.generation else ("generate",),
            modalities=(Modality(name="audio", placeholder_token_id=NO_TOKEN, cross=True),),
            max_encoder_len=int(config.max_source_positions),
            **look_at(found, int(config.max_target_positions), shard),
        )

    def capture_refusal(self, facts: ModelFacts, device: str, dtype: str) -> str | None:
        """Return None, because the core itself captures no cross-attention."""
        return None

    def load(self, context: ModelContext) -> SpeechModel:
        """See `slotline.registry.contracts.model_family.ModelFamily.load`."""
        return SpeechModel(context)

    @staticmethod
    def examples() -> Mapping[str, FamilyExample]:
        """See `slotline.registry.contracts.ExampleFamily.examples`."""
        from slotline.plugins.model_families.examples import speech_examples

        return speech_examples()


class SpeechModel(EncoderDecoderModel):
    """A loaded model, whose items are recordings. Implements `MultimodalModel`."""

    architectures = ARCHITECTURES

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        (modality,) = context.facts.modalities
        self._processing = AudioProcessing(context.facts.path, modality, context.facts.max_encoder_len)

    def process(self, modality: str, item: Any) -> ProcessedItem:
        """See `slotline.registry.contracts.model_family.MultimodalModel.process`."""
        return self._processing.process(item)

    def example(self, modality: str) -> ProcessedItem:
        """See `slotline.registry.contracts.model_family.MultimodalModel.example`."""
        return self._processing.example()

    @torch.inference_mode()
    def encode(self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the encoder's states [max_encoder_len, hidden_size] of each recording, all computed in one call."""
        features = torch.stack([item["input_features"] for item in items])  # [items, mel bins, frames]
        states = self.hf_model.model.encoder(features.to(self._device, self.hf_model.dtype)).last_hidden_state
        return list(states)
