"""Language models of transformers that see images through a vision encoder. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts.model_family import ModelFamilyCapabilities
from slotline.registry.descriptor import Descriptor, Kind

GRIDS: tuple[str, ...] = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Models whose images have sizes of their own, and whose rotary embeddings read a time, a row and a column."""

TIMED: tuple[str, ...] = GRIDS[2:]
"""Those that write times between the frames of a video."""

PADDED: tuple[str, ...] = ("Gemma4ForConditionalGeneration",)
"""Models that read the padding token in the place of a placeholder: in their layers' own embeddings of tokens, and
wherever a placeholder comes without an item."""

PROMPT_TOKENS: Mapping[str, str] = MappingProxyType({"Gemma3ForConditionalGeneration": "boi_token_id"})
"""Where a configuration has the token that represents an image in a prompt, if that takes no embedding."""

INSIDE: tuple[str, ...] = ("Phi4MultimodalForCausalLM",)
"""Decoders that hold their encoders."""

ARCHITECTURES: tuple[str, ...] = (
    "Gemma3ForConditionalGeneration",
    *PADDED,
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    *INSIDE,
    "SmolVLMForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    *GRIDS,
)
"""Every one is compared with transformers' own text by the tests. They have one shape: an encoder with a projector, and
a decoder that reads its embeddings in the place of placeholder tokens, under plain causal attention."""

DECODERS: tuple[str, ...] = (
    "Gemma3ForCausalLM",
    "Gemma4ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""Decoders whose logits the whole models make in the same way: Gemma 4 with its cap, the others without any."""

descriptor: Descriptor[ModelFamilyCapabilities] = Descriptor(
    kind=Kind.MODEL_FAMILY,
    name="transformers_vision",
    capabilities=ModelFamilyCapabilities(
        architectures=Set(ARCHITECTURES),
        devices=Set(("cpu", "cuda")),
        tasks=Set(("generate",)),
        pipeline=Flag(True),
        taps=Flag(True),
        adapters=Flag(True),
        single_adapter=Flag(True),
        staged_adapters=Flag(True),
        tensor=Max(),
        sequence=Flag(True),
        pipeline_ranks=Flag(True),
        prompt_embeds=Flag(True),
    ),
    factory="slotline.plugins.model_families.vision_model:TransformersVision",
    options="slotline.plugins.model_families.decoder:DecoderOptions",
    summary="checkpoints that take images and text, in Hugging Face format, through transformers' own modules",
)
