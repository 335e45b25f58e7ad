"""Model family for recordings and text: an audio encoder in the place of `vision_model`'s encoder of images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import slotline.plugins.model_families.lighter_imports  # noqa: F401

# isort: split
from transformers.masking_utils import create_bidirectional_mask

from slotline.plugins.model_families.audio import ARCHITECTURES, MASKED
from slotline.plugins.model_families.audio_processing import MaskedProcessing, WindowsProcessing
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.vision_model import TransformersVision, VisionModel
from slotline.registry.contracts.family_example import FamilyExample
from slotline.registry.contracts.model_family import Modality, ModelContext

AUDIO = "audio"


class TransformersAudio(TransformersVision):
    """Family of every model of `audio.ARCHITECTURES`. It keeps no state, so one instance may load many models."""

    architectures = ARCHITECTURES

    def modalities(self, found: Checkpoint) -> tuple[Modality, ...]:
        """Return audio."""
        return (Modality(name=AUDIO, placeholder_token_id=int(found.config.audio_token_id)),)

    def load(self, context: ModelContext) -> AudioModel:
        """See `slotline.registry.contracts.model_family.ModelFamily.load`."""
        return AudioModel(context)

    @staticmethod
    def examples() -> Mapping[str, FamilyExample]:
        """See `slotline.registry.contracts.ExampleFamily.examples`."""
        from slotline.plugins.model_families.examples import audio_examples

        return audio_examples()


class AudioModel(VisionModel):
    """A loaded decoder with its audio encoder. Implements `MultimodalModel`."""

    architectures = ARCHITECTURES

    def _processing_of(self, modality: Modality) -> Any:
        audio = self._rule.config.audio_config
        if self.facts.architecture in MASKED:
            return MaskedProcessing(self.facts.path, modality, audio.max_source_positions // 2)
        states = audio.max_source_positions * audio.d_model // audio.intermediate_size
        return WindowsProcessing(self.facts.path, modality, states)

    def _encode_alike(self, modality: str, items: list[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        if self.facts.architecture in MASKED:
            return self._encode_masked(items)
        windows = torch.cat([item["input_features"] for item in items]).to(self._device)
        rows = self.hf_model.encoder.get_audio_features(windows, return_dict=True).pooler_output
        return list(rows.chunk(len(items)))

    def _encode_masked(self, items: list[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Encode without attention to the silence behind each recording, as `Qwen2AudioModel.forward` does."""
        encoder = self.hf_model.encoder
        features, masks = (
            torch.stack([item[name] for item in items]).to(self._device)
            for name in ("input_features", "feature_attention_mask")
        )
        frames, counts = encoder.audio_tower._get_feat_extract_output_lengths(masks.sum(-1))
        states = (features.shape[-1] - 2) // 2 + 1
        known = torch.arange(states, device=self._device) < frames[:, None]  # [items, states behind convolutions]
        mask = create_bidirectional_mask(
            config=encoder.audio_tower.config,
            inputs_embeds=torch.zeros((len(items), states, 1), dtype=self.hf_model.dtype, device=self._device),
            attention_mask=known.long(),
        )
        rows = encoder.multi_modal_projector(encoder.audio_tower(features, attention_mask=mask).last_hidden_state)
        return [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]
