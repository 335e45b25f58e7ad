"""Model family for images and text: an encoder followed by a decoder as `transformers_model` runs it.

The whole transformers model is read once and divided. Its language model becomes an ordinary causal model, so that
inspection, attention slots, passes and graphs are the same as a decoder's. Encoder and projector are not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve

import slotline.plugins.model_families.lighter_imports  # noqa: F401

# isort: split
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from slotline.plugins.model_families import (
    binding,
    checkpoint,
    image_rows,
    inspection,
    keys_ahead,
    loading,
    packed_attention,
    weight_sizes,
)
from slotline.plugins.model_families.causal import causal_class
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.cropped_images import CroppedImages, ImageEncoder, TextAlone
from slotline.plugins.model_families.grid_images import AXES, GridProcessing, bare, grid_positions
from slotline.plugins.model_families.grid_videos import VideoProcessing, times_writer
from slotline.plugins.model_families.image_processing import ImageProcessing
from slotline.plugins.model_families.layer_embeds import added
from slotline.plugins.model_families.transformers_model import DecoderModel, TransformersDecoder
from slotline.plugins.model_families.video_frames import FrameVideos
from slotline.plugins.model_families.video_pruning import KEPT, unpruned
from slotline.plugins.model_families.vision import ARCHITECTURES, DECODERS, GRIDS, INSIDE, PADDED, PROMPT_TOKENS, TIMED
from slotline.registry.contracts.family_example import FamilyExample
from slotline.registry.contracts.model_family import Modality, ModelContext, ModelFacts, ProcessedItem, Shard
from slotline.registry.errors import ModelError

IMAGE, VIDEO = "image", "video"
DECODER_NAMES = frozenset({"language_model", "text_model"})
"""Names of the decoder among the parts of a model with vision."""


class TransformersVision(TransformersDecoder):
    """Family of every model of `architectures`. It keeps no state, so one instance may load many models."""

    architectures: tuple[str, ...] = ARCHITECTURES

    def inspect(
        self, path: Path, *, quantized: bool = False, weights: bool = True, shard: Shard | None = None
    ) -> ModelFacts:
        """See `slotline.registry.contracts.model_family.ModelFamily.inspect`."""
        found = checkpoint.read(Path(path), self.architectures)
        weight_sizes.require_weights(found)
        _refuse_no_encoder(found)
        facts = inspection.facts_of(_decoder_of(found), shard)
        facts = keys_ahead.with_keys_ahead(facts, found.model_class, found.config)
        size = 0 if found.architecture in INSIDE else _encoder_size(found)
        return evolve(
            facts,
            architecture=found.architecture,
            dtype=found.dtype,
            tasks=("generate",),
            num_parameters=facts.num_parameters + size,
            parts=facts.parts and evolve(facts.parts, embedding=facts.parts.embedding + size),
            modalities=self.modalities(found),
            position_axes=AXES if found.architecture in GRIDS else 1,
            layer_embeds=_layer_embeds(found, facts),
        )

    def modalities(self, found: Checkpoint) -> tuple[Modality, ...]:
        """Return what a checkpoint takes besides text."""
        return _modalities(found)

    def load(self, context: ModelContext) -> VisionModel:
        """See `slotline.registry.contracts.model_family.ModelFamily.load`."""
        return VisionModel(context)

    @staticmethod
    def examples() -> Mapping[str, FamilyExample]:
        """See `slotline.registry.contracts.ExampleFamily.examples`."""
        from slotline.plugins.model_families.examples import vision_examples

        return vision_examples()


class VisionModel(DecoderModel):
    """A loaded decoder with its vision encoder. Implements `MultimodalModel`."""

    architectures: tuple[str, ...] = ARCHITECTURES

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._placeholders = {m.name: m.placeholder_token_id for m in context.facts.modalities}
        self._processing = {m.name: self._processing_of(m) for m in context.facts.modalities}
        self._device = torch.device(context.stages[0].device if context.stages else context.device)
        self._unread: torch.Tensor | None = None
        if self.facts.architecture in PADDED:
            self._unread = torch.tensor(_unread_tokens(self._rule.config), device=self._device)

    def _processing_of(self, modality: Modality) -> ImageProcessing | VideoProcessing | FrameVideos | CroppedImages:
        if self.facts.architecture in INSIDE:
            return CroppedImages(self.facts.path, modality, self._rule.config.vision_config)
        if modality.name == VIDEO and self.facts.architecture not in GRIDS:
            return FrameVideos(self.facts.path, modality, self._rule.config.vision_config)
        if modality.name == VIDEO:
            times = times_writer(self.facts.path, self._rule.config) if self.facts.architecture in TIMED else None
            return VideoProcessing(self.facts.path, modality, self._rule.config.vision_config, times)
        config = self._rule.config
        if self.facts.architecture in GRIDS:
            return GridProcessing(self.facts.path, modality, config.vision_config.spatial_merge_size)
        if config.vision_config.model_type == image_rows.MODEL_TYPE:
            side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
            return image_rows.RowProcessing(self.facts.path, modality, side)
        return ImageProcessing(self.facts.path, modality)

    def axis_positions(
        self, token_ids: Sequence[int], items: Sequence[tuple[str, Mapping[str, torch.Tensor]]]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """See `slotline.registry.contracts.model_family.MultimodalModel.axis_positions`."""
        apart = (VIDEO,) if self.facts.architecture in TIMED else ()
        videos = [inputs[KEPT] for _, inputs in items if KEPT in inputs]
        if not videos:
            return grid_positions(self._rule, self._placeholders, token_ids, items, apart)
        start = self._rule.config.vision_start_token_id if apart else None
        whole, places = unpruned(list(token_ids), self._placeholders[VIDEO], videos, start)
        positions = grid_positions(self._rule, self._placeholders, whole, items, apart)[0][:, places]
        return positions, int(positions[:, -1].max()) + 1 - len(places)

    def forward(
        self,
        input_ids: torch.Tensor,
        *args: Any,
        layer_embeds: tuple[torch.Tensor, torch.Tensor] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """See `slotline.registry.contracts.model_family.MultimodalModel.forward`."""
        input_ids = self._read_tokens(input_ids)
        if layer_embeds is None:
            return super().forward(input_ids, *args, **options)
        with added(self.hf_model.base_model.layers, *layer_embeds, self._token_division):
            return super().forward(input_ids, *args, **options)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See `slotline.registry.contracts.model_family.MultimodalModel.embed`."""
        return super().embed(self._read_tokens(input_ids))

    def _read_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return token ids [num_tokens], with padding in the place of those that the model does not read."""
        if self._unread is None:
            return input_ids
        unread = (input_ids[:, None] == self._unread).any(-1)
        return input_ids.masked_fill(unread, self._rule.config.text_config.pad_token_id)

    def process(self, modality: str, item: Any) -> ProcessedItem:
        """See `slotline.registry.contracts.model_family.MultimodalModel.process`."""
        return self._processing[modality].process(item)

    def prune(self, item: ProcessedItem, rate: float) -> ProcessedItem:
        """See `slotline.registry.contracts.model_family.PruningModel.prune`."""
        processing = self._processing[item.modality]
        assert isinstance(processing, VideoProcessing)
        return processing.prune(item, rate)

    def join(self, left: Sequence[int], right: Sequence[int]) -> list[int]:
        """See `slotline.registry.contracts.model_family.JoiningModel.join`."""
        images = self._processing.get(IMAGE)
        return images.join(left, right) if isinstance(images, ImageProcessing) else [*left, *right]

    def example(self, modality: str) -> ProcessedItem:
        """See `slotline.registry.contracts.model_family.MultimodalModel.example`."""
        return self._processing[modality].example()

    @torch.inference_mode()
    def encode(self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Return embeddings [n, (1 + layer_embeds) * hidden_size] of each item.

        Those of equal shapes go together. Pruned items go alone, since a step counts only what is left of them.
        """
        alike: dict[Any, list[int]] = {}
        for place, item in enumerate(items):
            alone = place if KEPT in item else None
            alike.setdefault((alone, *sorted((name, value.shape) for name, value in item.items())), []).append(place)
        outputs: dict[int, torch.Tensor] = {}
        for places in alike.values():
            outputs |= zip(places, self._encode_alike(modality, [items[place] for place in places]), strict=True)
        return [outputs[place] for place in range(len(items))]

    def _encode_alike(self, modality: str, items: list[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        features = getattr(self.hf_model.encoder, f"get_{modality}_features")
        inputs = {}
        for name in items[0].keys() & inspect.signature(features).parameters.keys():
            value = torch.cat([item[name] for item in items])
            inputs[name] = value.to(self._device, self.hf_model.dtype if value.is_floating_point() else None)
        outputs = features(**inputs, return_dict=True)
        further = getattr(outputs, "deepstack_features", None) or ()
        parts = [torch.cat(list(part)).flatten(0, -2) for part in (outputs.pooler_output, *further)]
        rows = torch.cat(parts, dim=-1)  # [all items' embeddings, (1 + layer_embeds) * hidden_size]
        if len(items) == 1:
            return [rows if KEPT not in items[0] else _kept(items[0], rows)]
        pooled, equal = outputs.pooler_output, len(rows) // len(items)
        counts = [part[..., 0].numel() for part in pooled] if len(pooled) == len(items) else [equal] * len(items)
        return [part.clone() for part in rows.split(counts)]  # each in memory that it can give back

    def _load(self, context: ModelContext) -> tuple[Any, torch.nn.Module | None]:
        """Return the decoder as a separate causal model, and the rest of the base model."""
        found = checkpoint.read(context.facts.path, self.architectures)
        whole = loading.load_transformers_model(context, found, attention="sdpa")
        if found.architecture in INSIDE:
            encoder = ImageEncoder(whole.model.embed_tokens_extend.image_embed, whole.config)
            whole.model.embed_tokens_extend = TextAlone()
            self._rule = bare(whole)
            return _calling_slots(whole), encoder
        encoder, decoder = whole.model, _decoder_of(found)
        self._rule = bare(encoder)
        if found.architecture in GRIDS:
            device = torch.device(context.stages[0].device if context.stages else context.device)
            packed_attention.serve(encoder.visual, whole.config.vision_config, device)
        with torch.device("meta"):
            hf_model = decoder.model_class(decoder.config)
        hf_model.model, hf_model.lm_head = _take_decoder(encoder), whole.lm_head
        hf_model.config = whole.config.text_config  # the very object that the attention modules read
        return _calling_slots(hf_model), encoder


def _calling_slots(hf_model: Any) -> Any:
    """Return a decoder whose attention modules call the engine's slots."""
    binding.register(binding.ATTENTION_NAME, binding.slot_attention)
    hf_model.config._attn_implementation = binding.ATTENTION_NAME
    return hf_model.eval().requires_grad_(False)


def _refuse_no_encoder(found: Checkpoint) -> None:
    """Refuse a model of this class that was saved without its encoder.

    Raises:
        ModelError: if it was.
    """
    if getattr(found.config, "vision_config", found) is None:
        raise ModelError(
            f"{found.path / 'config.json'}: vision_config = null, so this {found.architecture} sees nothing",
            fix="set multimodal.text_only = true to serve its text part, or download config.json again",
        )


def _encoder_size(found: Checkpoint) -> int:
    """Return the number of parameters beside the decoder's."""
    with inspection.sizes_that_fit(found), torch.device("meta"):
        encoder = found.model_class(found.config).model
    _take_decoder(encoder)
    return sum(parameter.numel() for parameter in encoder.parameters())


def _take_decoder(whole: torch.nn.Module) -> torch.nn.Module:
    """Return the decoder of a model without a head, which loses it."""
    name, decoder = next((name, child) for name, child in whole.named_children() if name in DECODER_NAMES)
    delattr(whole, name)
    return decoder


def _kept(item: Mapping[str, torch.Tensor], embeddings: torch.Tensor) -> torch.Tensor:
    return embeddings[item[KEPT].flatten().nonzero().flatten().to(embeddings.device, non_blocking=True)]


def _modalities(found: Checkpoint) -> tuple[Modality, ...]:
    key = PROMPT_TOKENS.get(found.architecture)
    config = found.config.vision_config if found.architecture in INSIDE else found.config
    image = Modality(
        name=IMAGE,
        placeholder_token_id=int(config.image_token_id),
        prompt_token_id=None if key is None else int(getattr(found.config, key)),
    )
    if not hasattr(found.model_class, f"get_{VIDEO}_features"):
        return (image,)
    prunable = found.architecture in GRIDS
    return image, Modality(name=VIDEO, placeholder_token_id=int(found.config.video_token_id), prunable=prunable)


def _unread_tokens(config: Any) -> list[int]:
    """Return the placeholder tokens of all modalities, also of those that are not served."""
    named = (getattr(config, f"{name}_token_id", None) for name in ("image", "video", "audio"))
    return [token for token in named if token is not None]


def _layer_embeds(found: Checkpoint, facts: ModelFacts) -> int:
    """Return the number of layers behind which embeddings of images are added.

    Raises:
        ModelError: if the decoder has no more layers than that.
    """
    count = len(getattr(getattr(found.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    if count >= len(facts.layers):
        raise ModelError(
            f"{found.architecture} in {found.path} has {count} deepstack_visual_indexes for {len(facts.layers)} layers",
            fix="use a checkpoint whose decoder has more layers than the encoder has deepstack_visual_indexes",
        )
    return count


def _decoder_of(found: Checkpoint) -> Checkpoint:
    """Return the decoder's part of a checkpoint.

    Raises:
        ModelError: if this family does not support the decoder.
    """
    if found.architecture in INSIDE:
        return found
    text = found.config.text_config
    if found.architecture in GRIDS:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None) or causal_class(MODEL_MAPPING[type(text)])
        return evolve(found, architecture=model_class.__name__, model_class=model_class, config=text)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    name = "none" if model_class is None else model_class.__name__
    if name not in DECODERS:
        raise ModelError(
            f"{found.architecture} in {found.path} has the decoder {name} ({text.model_type}), which is not served",
            fix=f"use a checkpoint with one of {', '.join(DECODERS)}, or a model family plugin that serves this one",
        )
    return evolve(found, architecture=name, model_class=model_class, config=text)
