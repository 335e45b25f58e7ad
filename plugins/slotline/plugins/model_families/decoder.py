"""Decoder-only language models of transformers, with attention bound to slots. This module does not import torch."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts.model_family import ModelFamilyCapabilities
from slotline.registry.descriptor import Descriptor, Kind

ARCHITECTURES: tuple[str, ...] = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Starcoder2ForCausalLM",
)
"""Every one is compared with transformers' own logits by the tests."""

STATE_ARCHITECTURES: tuple[str, ...] = (
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "Lfm2ForCausalLM",
    "MambaForCausalLM",
    "Mamba2ForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "RecurrentGemmaForCausalLM",
    "Zamba2ForCausalLM",
)
"""Those with layers that keep a state, alone or beside attention; compared as the others are."""

SHARING: tuple[str, ...] = ("Gemma3nForCausalLM", "Gemma4ForCausalLM")
"""Decoders some of whose layers read the keys and values of others; compared as the others are."""

CHUNKED: tuple[str, ...] = ("Llama4ForCausalLM",)
"""Decoders whose attention stays within chunks, which not every backend has; their tests are apart."""

LATENT: tuple[str, ...] = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "MiniCPM3ForCausalLM",
    "YoutuForCausalLM",
)
"""Decoders with multi-head latent attention, which not every backend has; compared as the others are."""

INDEXED: tuple[str, ...] = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
"""Decoders with latents and an index that picks keys, which not every backend has; compared as the others are."""

OWN_ATTENTION: tuple[str, ...] = ("BloomForCausalLM", "FalconForCausalLM", "MptForCausalLM")
"""Decoders whose attention transformers computes inside their modules, with ALiBi but for some Falcons; compared as the
others are."""

EMBEDDERS: tuple[str, ...] = (
    "Gemma2Model",
    "Gemma3TextModel",
    "Glm4MoeModel",
    "GptOssModel",
    "GraniteModel",
    "LlamaModel",
    "MistralModel",
    "MixtralModel",
    "Olmo2Model",
    "Phi3Model",
    "Qwen2Model",
    "Qwen3Model",
    "Qwen3MoeModel",
    "Starcoder2Model",
)
"""The same decoders without an output projection."""

CLASSIFIERS: tuple[str, ...] = (
    "Gemma2ForSequenceClassification",
    "Gemma3TextForSequenceClassification",
    "GptOssForSequenceClassification",
    "LlamaForSequenceClassification",
    "MistralForSequenceClassification",
    "MixtralForSequenceClassification",
    "Olmo2ForSequenceClassification",
    "Phi3ForSequenceClassification",
    "Qwen2ForSequenceClassification",
    "Qwen3ForSequenceClassification",
    "Qwen3MoeForSequenceClassification",
    "Starcoder2ForSequenceClassification",
)
"""The same decoders with a `score` head."""

TAGGERS: tuple[str, ...] = (
    "Gemma2ForTokenClassification",
    "GptOssForTokenClassification",
    "LlamaForTokenClassification",
    "MistralForTokenClassification",
    "MixtralForTokenClassification",
    "Phi3ForTokenClassification",
    "Qwen2ForTokenClassification",
    "Qwen3ForTokenClassification",
    "Qwen3MoeForTokenClassification",
    "Starcoder2ForTokenClassification",
    "Qwen2ForProcessRewardModel",
)
"""The same decoders with a `score` head over each token."""

REWARDERS: tuple[str, ...] = ("Qwen2ForRewardModel",)
"""Decoders with a head of two layers over the last token, which gives the reward of the whole text."""

_ATTENDING: tuple[str, ...] = (*ARCHITECTURES, *CHUNKED, *SHARING, *LATENT, *INDEXED, *OWN_ATTENTION)
GENERATING: tuple[str, ...] = (*_ATTENDING, *STATE_ARCHITECTURES)
SERVED: tuple[str, ...] = (*GENERATING, *EMBEDDERS, *CLASSIFIERS, *TAGGERS, *REWARDERS)

INNER: tuple[str, ...] = (
    "Qwen2VLForCausalLM",
    "Qwen2_5_VLForCausalLM",
    "Qwen3VLForCausalLM",
    "Qwen3VLMoeForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
"""Decoders that are found inside models with vision. The names are those of `causal.causal_class`."""

VETTED: tuple[str, ...] = (*SERVED, *INNER)
"""Decoders that the tests compare with transformers."""


@frozen(kw_only=True)
class DecoderOptions:
    """The plugin's own table.

    Attributes:
        lean: run the decoder layers in our own loop if that gives the same logits (checked at load). false always calls
            transformers' own forward.
        pooling: hidden states used for an embedding. ``auto`` is the checkpoint's pooling, else ``last``.
        cpu_products: layout of weights on a CPU. ``timed`` takes the fastest for each shape (timed once, then kept in
            the cache folder), ``onednn`` oneDNN's, ``plain`` the checkpoint's own.
        layer_kernel: compute all between two attentions of a small model in one launch for 2 to 8 tokens (Hopper).
    """

    lean: bool = True
    cpu_products: Literal["timed", "onednn", "plain"] = "timed"
    pooling: Literal["auto", "last", "cls", "mean"] = "auto"
    layer_kernel: bool = True


descriptor: Descriptor[ModelFamilyCapabilities] = Descriptor(
    kind=Kind.MODEL_FAMILY,
    name="transformers_decoder",
    capabilities=ModelFamilyCapabilities(
        architectures=Set(SERVED),
        devices=Set(("cpu", "cuda")),
        tasks=Set(("generate", "embed", "classify", "token_classify")),
        pipeline=Flag(True),
        taps=Flag(True),
        batch_invariant=Flag(True, "except models with experts"),
        adapters=Flag(True),
        single_adapter=Flag(True),
        staged_adapters=Flag(True),
        fast_prefill=Flag(True),
        quantized=Flag(True),
        by_inspection=Flag(True),
        load_formats=Set(("hf", "sharded", "dummy")),
        tensor=Max(),
        experts=Flag(True),
        expert_replicas=Flag(True),
        expert_groups=Flag(True),
        overlap=Flag(True),
        pipeline_ranks=Flag(True),
        sequence=Flag(True),
        compiled=Flag(True, "models of attention layers alone"),
        prompt_embeds=Flag(True),
    ),
    factory="slotline.plugins.model_families.transformers_model:TransformersDecoder",
    options="slotline.plugins.model_families.decoder:DecoderOptions",
    summary="decoder-only checkpoints in Hugging Face format, through transformers' own modules",
)
