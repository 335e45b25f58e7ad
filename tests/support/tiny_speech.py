"""Tiny Whisper checkpoints with random weights, recordings for them, and transformers' own greedy tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tiny_models import VOCAB_SIZE

RATE = 16000
NUM_STATES = 50  # of the one second that the tiny model hears
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "num_mel_bins": 16,
    "max_source_positions": NUM_STATES,
    "max_target_positions": 64,
    "init_std": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def build(path: Path, seed: int = 0) -> Path:
    """A checkpoint with a feature extractor."""
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(**SETTINGS)
    transformers.WhisperForConditionalGeneration(config).eval().save_pretrained(path)
    transformers.WhisperFeatureExtractor(feature_size=SETTINGS["num_mel_bins"], chunk_length=1).save_pretrained(path)
    return path


def recording(seed: int, seconds: float = 0.8) -> npt.NDArray[np.float32]:
    """A chord with noise, another one for each seed."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * time) for pitch in rng.uniform(100, 4000, 3))
    return (0.2 * tones + 0.05 * rng.standard_normal(len(time))).astype(np.float32)


@cache
def _oracle(path: Path) -> tuple[Any, Any]:
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        path, attn_implementation="eager", trust_remote_code=False
    )
    return model.eval(), transformers.WhisperFeatureExtractor.from_pretrained(path, trust_remote_code=False)


def greedy_reference(path: Path, audio: npt.NDArray[np.float32], prompt: list[int], max_tokens: int) -> list[int]:
    """What `generate` of transformers gives for one recording alone."""
    model, extractor = _oracle(path)
    features = extractor(audio, sampling_rate=RATE, return_tensors="pt").input_features
    model.generation_config = transformers.GenerationConfig(decoder_start_token_id=1, pad_token_id=0)  # no end token
    with torch.no_grad():
        found = transformers.GenerationMixin.generate(  # Whisper's own adds rules about timestamps
            model,
            input_features=features,
            decoder_input_ids=torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=max_tokens,
        )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens
