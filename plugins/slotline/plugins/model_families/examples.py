"""Tiny random checkpoints of the families of this package, written by transformers, for the conformance suite.

Their weights are wide (initializer_range 0.15), so that one lost key moves the outputs by their own size. No engine
imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from attrs import evolve

from slotline.plugins.model_families.loading import no_progress_bars
from slotline.registry.contracts.family_example import FamilyExample

VOCAB_SIZE, WINDOW, MAX_LEN = 160, 8, 256
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_LEN,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
)
_LATENT: Mapping[str, Any] = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "n_group": 2,
        "topk_group": 1,
    }
)
_MAMBA2: Mapping[str, Any] = MappingProxyType(
    {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
        "attn_layer_indices": [1],
    }
)
_ALTERNATING = ["sliding_attention", "full_attention"]


def decoder_examples() -> Mapping[str, FamilyExample]:
    """Return an example of each form of decoder layer, and of each task."""
    return {
        "grouped heads": generating("LlamaForCausalLM"),
        "windows and caps": generating("Gemma2ForCausalLM", sliding_window=WINDOW, layer_types=_ALTERNATING),
        "sinks and experts": generating(
            "GptOssForCausalLM",
            sliding_window=WINDOW,
            layer_types=_ALTERNATING,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "shared caches": generating(
            "Gemma4ForCausalLM",
            sliding_window=WINDOW,
            num_hidden_layers=4,
            layer_types=_ALTERNATING * 2,
            global_head_dim=24,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB_SIZE,
            tie_word_embeddings=True,
        ),
        "latents": generating("DeepseekV3ForCausalLM", **_LATENT),
        "states": generating("BambaForCausalLM", **_MAMBA2),
        "slopes": evolve(generating("BloomForCausalLM", n_layer=2, n_head=4, seq_length=MAX_LEN), embeds_first=False),
        "embeddings": pooling("LlamaModel", "embed"),
        "classes": pooling("LlamaForSequenceClassification", "classify"),
        "tags": pooling("LlamaForTokenClassification", "token_classify"),
    }


def encoder_examples() -> Mapping[str, FamilyExample]:
    """Return an example of each form of encoder layer, and of each task."""
    return {
        "embeddings": pooling("BertModel", "embed", unread=("pooler.*",)),
        "classes": pooling("BertForSequenceClassification", "classify"),
        "windows": pooling(
            "ModernBertModel", "embed", local_attention=8, global_attn_every_n_layers=2, num_hidden_layers=3
        ),
        "tags": pooling("RobertaForTokenClassification", "token_classify", max_position_embeddings=MAX_LEN + 2),
    }


def vision_examples() -> Mapping[str, FamilyExample]:
    """Return an example of a decoder that sees: with three positions for each token, and embeddings in its layers."""
    return {
        "grids": FamilyExample(write=_write_qwen3_vl, item=image, tokens=(10, VOCAB_SIZE), expected=_text_logits),
    }


def audio_examples() -> Mapping[str, FamilyExample]:
    """Return an example of a decoder that hears."""
    return {
        "sounds": FamilyExample(write=_write_qwen2_audio, item=recording, tokens=(3, VOCAB_SIZE), expected=_text_logits)
    }


def speech_examples() -> Mapping[str, FamilyExample]:
    """Return an example of a decoder whose layers read an encoder of sounds."""
    return {"sounds": FamilyExample(write=_write_whisper, item=recording, expected=_whisper_logits)}


def seq2seq_examples() -> Mapping[str, FamilyExample]:
    """Return an example with positions and one with biases by distance."""
    return {
        "positions": FamilyExample(
            write=partial(_write_seq2seq, "Bart", {}),
            item=prompt,
            expected=_seq2seq_logits,
            optional=("final_logits_bias",),
            unread=("model.shared.weight",),
        ),
        "distances": FamilyExample(write=partial(_write_seq2seq, "T5", _T5), item=prompt, expected=_seq2seq_logits),
    }


def generating(architecture: str, unread: tuple[str, ...] = (), **settings: Any) -> FamilyExample:
    """Return an example of an architecture of transformers that generates. Its settings override the common sizes."""
    return FamilyExample(
        write=partial(write, architecture, settings),
        expected=partial(answers_of, architecture, "logits"),
        unread=unread,
    )


def pooling(architecture: str, task: str, unread: tuple[str, ...] = (), **settings: Any) -> FamilyExample:
    """Return an example of an architecture of transformers for a task that pools."""
    return FamilyExample(
        write=partial(write, architecture, settings),
        task=task,
        expected=partial(answers_of, architecture, "last_hidden_state"),
        unread=unread,
    )


def write(architecture: str, settings: Mapping[str, Any], folder: Path, seed: int) -> None:
    """Write a checkpoint with random weights."""
    cls = getattr(transformers, architecture)
    config = cls.config_class(**{**SIZES, **settings})
    save(lambda: cls(config), folder, seed)


def save(make: Callable[[], Any], folder: Path, seed: int) -> None:
    """Write a model that `make` initializes at random. Biases are not 0 then, and norms not 1."""
    with torch.random.fork_rng(devices=()), torch.no_grad(), no_progress_bars():
        torch.manual_seed(seed)
        model = make()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.15)
        model.save_pretrained(folder)


def answers_of(architecture: str, what: str, folder: Path, token_ids: Sequence[int], item: Any) -> torch.Tensor:
    """Return transformers' own logits or last hidden states of one text, in eager attention."""
    model = _whole(architecture, folder)
    body = model if what == "logits" else model.base_model
    with torch.no_grad():
        found: torch.Tensor = getattr(body(torch.tensor([list(token_ids)])), what)[0]
    return found


@lru_cache(maxsize=4)
def _whole(architecture: str, folder: Path) -> Any:
    with no_progress_bars():
        model = getattr(transformers, architecture).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
    return model.eval()


# --- models with items

_GRID: Mapping[str, Any] = MappingProxyType({"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2})
_SPEECH: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "init_std": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
)
_T5: Mapping[str, Any] = MappingProxyType(
    {
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "n_positions": 64,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
        "feed_forward_proj": "gated-gelu",
    }
)
MEL_BINS, STATES, RATE = 16, 50, 16000


def image(number: int) -> tuple[str, Any]:
    """Return a modality and a PIL image of noise."""
    import numpy as np
    from PIL import Image

    return "image", Image.fromarray(np.random.default_rng(number).integers(0, 255, (24, 16, 3), dtype=np.uint8))


def recording(number: int) -> tuple[str, Any]:
    """Return a modality and a recording of noise, 0.6 s or more."""
    import numpy as np

    noise = np.random.default_rng(number).standard_normal(int((0.6 + 0.1 * (number // 2 % 3)) * RATE))
    return "audio", (0.3 * noise).astype(np.float32)


def prompt(number: int) -> tuple[str, Any]:
    """Return a modality and an encoder's prompt of token ids."""
    return "encoder_prompt", [3 + (7 * number + 5 * place) % (VOCAB_SIZE - 3) for place in range(6 + number // 2 % 5)]


def _write_qwen3_vl(folder: Path, seed: int) -> None:
    tower = {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen3VLConfig(
        text_config={**SIZES, "rope_parameters": rope},
        vision_config={**tower, **_GRID, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        image_token_id=4,
        video_token_id=5,
        vision_start_token_id=6,
        vision_end_token_id=7,
    )
    save(lambda: transformers.Qwen3VLForConditionalGeneration(config), folder, seed)
    kind = getattr(transformers, "Qwen2VLImageProcessorPil", transformers.Qwen2VLImageProcessor)
    kind(patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=64, max_pixels=32 * 32).save_pretrained(folder)


def _write_qwen2_audio(folder: Path, seed: int) -> None:
    tower = {"d_model": 64, "num_mel_bins": MEL_BINS, "max_source_positions": STATES, "initializer_range": 0.15}
    config = transformers.Qwen2AudioConfig(
        audio_config=transformers.Qwen2AudioEncoderConfig(
            **tower, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=96
        ),
        text_config=transformers.Qwen2Config(**SIZES),
        audio_token_id=0,
    )
    save(lambda: transformers.Qwen2AudioForConditionalGeneration(config), folder, seed)
    transformers.WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=1).save_pretrained(folder)


def _write_whisper(folder: Path, seed: int) -> None:
    config = transformers.WhisperConfig(
        **_SPEECH,
        num_mel_bins=MEL_BINS,
        max_source_positions=STATES,
        max_target_positions=64,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    save(lambda: transformers.WhisperForConditionalGeneration(config), folder, seed)
    transformers.WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=1).save_pretrained(folder)


def _write_seq2seq(family: str, settings: Mapping[str, Any], folder: Path, seed: int) -> None:
    config = getattr(transformers, f"{family}Config")(
        **{**_SPEECH, "max_position_embeddings": 64, "tie_word_embeddings": False, "forced_eos_token_id": None},
        **settings,
    )

    def make() -> Any:
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
        for name, weight in model.named_parameters():
            if "relative_attention_bias" in name:  # part of the facts, so the same for each seed
                weight.copy_(torch.sin(torch.arange(weight.numel()).float() * 7).view_as(weight))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.5)
        return model

    save(make, folder, seed)


def _text_logits(folder: Path, token_ids: Sequence[int], item: Any) -> torch.Tensor:
    """Return the logits of a text without items."""
    with torch.no_grad():
        found: torch.Tensor = _model_of(folder)(input_ids=torch.tensor([list(token_ids)])).logits[0]
    return found


def _whisper_logits(folder: Path, token_ids: Sequence[int], item: Any) -> torch.Tensor:
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder, trust_remote_code=False)
    features = extractor(item, sampling_rate=RATE, return_tensors="pt").input_features
    with torch.no_grad():
        model = _model_of(folder)
        found: torch.Tensor = model(input_features=features, decoder_input_ids=torch.tensor([list(token_ids)])).logits[
            0
        ]
    return found


def _seq2seq_logits(folder: Path, token_ids: Sequence[int], item: Any) -> torch.Tensor:
    with torch.no_grad():
        model = _model_of(folder)
        found: torch.Tensor = model(torch.tensor([item]), decoder_input_ids=torch.tensor([list(token_ids)])).logits[0]
    return found


def _model_of(folder: Path) -> Any:
    """Return transformers' own model of a folder."""
    (name,) = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures
    return _whole(name, folder)
