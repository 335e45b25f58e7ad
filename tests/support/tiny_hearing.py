"""Tiny random checkpoints that hear recordings in a decoder, and what transformers itself answers on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny_models
import torch
import transformers
from tiny_speech import NUM_STATES, RATE, SETTINGS, recording

TOKENS = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
PLACEHOLDER = TOKENS["audio_token"]
SECONDS: Mapping[str, Sequence[float]] = {"qwen2_audio": (0.8, 0.33, 1.0, 0.27), "voxtral": (0.8, 1.7, 1.0, 2.3)}
"""Length of the recording of each seed, over and over. Voxtral hears more than a window."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}"
    "{% if c['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}\n{% endfor %}assistant:"
)
_SIZES = {**tiny_models._SIZES, "vocab_size": 392}
_ENCODER = {
    "d_model": 64,
    "num_mel_bins": SETTINGS["num_mel_bins"],
    "max_source_positions": NUM_STATES,
    "initializer_range": 0.15,
}


def sound(name: str, seed: int) -> Any:
    """The recording of a seed, of a length that depends on it."""
    seconds = SECONDS[name]
    return recording(seed, seconds[seed % len(seconds)])


def build(name: str, path: Path) -> Path:
    """Write a random checkpoint with tokenizer and feature extractor into `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tiny_models.build_tokenizer(path)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        path, extra_special_tokens=TOKENS, trust_remote_code=False
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    model = {"qwen2_audio": _qwen2_audio, "voxtral": _voxtral}[name](tokenizer.convert_tokens_to_ids(PLACEHOLDER))
    tiny_models._widen(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    transformers.WhisperFeatureExtractor(feature_size=_ENCODER["num_mel_bins"], chunk_length=1).save_pretrained(path)
    return path


def _qwen2_audio(token: int) -> Any:
    encoder = transformers.Qwen2AudioEncoderConfig(
        **_ENCODER, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=96
    )
    text = transformers.Qwen2Config(**_SIZES)
    config = transformers.Qwen2AudioConfig(audio_config=encoder, text_config=text, audio_token_id=token)
    return transformers.Qwen2AudioForConditionalGeneration(config)


def _voxtral(token: int) -> Any:
    encoder = transformers.VoxtralEncoderConfig(
        **{name: value for name, value in _ENCODER.items() if name != "d_model"},
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,  # two states for a token
    )
    text = transformers.LlamaConfig(**_SIZES)
    config = transformers.VoxtralConfig(audio_config=encoder, text_config=text, audio_token_id=token)
    return transformers.VoxtralForConditionalGeneration(config)


@cache
def _oracle(name: str, path: Path) -> tuple[Any, Any, Any]:
    kind = {"qwen2_audio": "Qwen2Audio", "voxtral": "Voxtral"}[name] + "ForConditionalGeneration"
    model = getattr(transformers, kind).from_pretrained(path, attn_implementation="eager", trust_remote_code=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return model.eval(), tokenizer, transformers.WhisperFeatureExtractor.from_pretrained(path, trust_remote_code=False)


def _inputs(name: str, path: Path, text: str, seeds: Sequence[int]) -> dict[str, Any]:
    _, tokenizer, extractor = _oracle(name, path)
    sounds = [sound(name, seed) for seed in seeds]
    if not sounds:
        return dict(tokenizer(text, return_tensors="pt"))
    if name == "qwen2_audio":
        processor = transformers.Qwen2AudioProcessor(extractor, tokenizer)
        return dict(processor(text=text, audio=sounds, sampling_rate=RATE, return_tensors="pt"))
    given = {"sampling_rate": RATE, "padding": True, "truncation": False, "pad_to_multiple_of": RATE}
    own = SimpleNamespace(feature_extractor=extractor)
    parts = [
        transformers.VoxtralProcessor._retrieve_input_features(own, [one], 2 * NUM_STATES, **given, return_tensors="pt")
        for one in sounds
    ]
    first, *others = text.split(PLACEHOLDER)
    texts = [PLACEHOLDER * (len(part) * NUM_STATES // 2) + other for part, other in zip(parts, others, strict=True)]
    return {"input_features": torch.cat(parts), **tokenizer("".join([first, *texts]), return_tensors="pt")}


@cache
def answer(name: str, path: Path, text: str, seeds: tuple[int, ...], max_tokens: int) -> tuple[list[int], list[int]]:
    """The prompt's tokens and those of transformers' greedy generation, for a text with the recordings of seeds."""
    inputs = _inputs(name, path, text, seeds)
    inputs = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        out = _oracle(name, path)[0].generate(**inputs, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    length = inputs["input_ids"].shape[1]
    return inputs["input_ids"][0].tolist(), out[0, length:].tolist()
