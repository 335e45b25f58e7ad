"""Tiny Whisper checkpoints with random weights, recordings for them, and transformers' own greedy tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tiny_models import VOCAB_SIZE, build_tokenizer

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


def build(path: Path, seed: int = 0, **settings: Any) -> Path:
    """A checkpoint with a feature extractor."""
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(**{**SETTINGS, **settings})
    transformers.WhisperForConditionalGeneration(config).eval().save_pretrained(path)
    transformers.WhisperFeatureExtractor(feature_size=SETTINGS["num_mel_bins"], chunk_length=1).save_pretrained(path)
    return path


SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>")
SPECIAL += ("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
LONGEST = 28
"""Tokens of a window's transcript, prompt included."""
TIMES = tuple(f"<|{number * 0.02:.2f}|>" for number in range(NUM_STATES + 1))


def build_transcriber(path: Path, seed: int = 8) -> Path:
    """A checkpoint with a tokenizer and all tokens that transcripts need, in Whisper's order.

    The seed is one whose model writes several segments in few windows, and hears more than one language.
    """
    path.mkdir(parents=True, exist_ok=True)
    build_tokenizer(path)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, *TIMES]})
    tokenizer.save_pretrained(path)
    ids = {name.strip("<|>"): tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    sizes = {"vocab_size": len(tokenizer), "max_target_positions": LONGEST, "encoder_layers": 1, "decoder_layers": 2}
    build(path, seed, **sizes, eos_token_id=ids["endoftext"], bos_token_id=ids["endoftext"])
    generation = transformers.GenerationConfig(
        decoder_start_token_id=ids["startoftranscript"],
        eos_token_id=ids["endoftext"],
        pad_token_id=ids["endoftext"],
        bos_token_id=ids["endoftext"],
        max_length=LONGEST,
        no_timestamps_token_id=ids["notimestamps"],
        prev_sot_token_id=ids["startofprev"],
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": ids[code] for code in ("en", "de", "fr")},
        task_to_id={task: ids[task] for task in ("translate", "transcribe")},
        suppress_tokens=[5, 6, 7, *(ids[name] for name in ("startoftranscript", "transcribe", "translate"))],
        begin_suppress_tokens=[3, ids["endoftext"]],
        max_initial_timestamp_index=10,
    )
    generation.save_pretrained(path)
    return path


def transcript_reference(path: Path, audio: npt.NDArray[np.float32], **options: Any) -> list[dict[str, Any]]:
    """The segments of transformers' own `generate` for one recording: times in seconds, and tokens."""
    model, extractor = _oracle(path)
    model.generation_config = transformers.GenerationConfig.from_pretrained(path, trust_remote_code=False)
    long = {"truncation": False, "padding": "longest"} if len(audio) > extractor.n_samples else {}
    features = extractor(audio, sampling_rate=RATE, return_tensors="pt", **long).input_features
    with torch.no_grad():
        found = model.generate(features, return_segments=True, return_dict_in_generate=False, **options)
    return [
        {"start": float(one["start"]), "end": float(one["end"]), "tokens": one["tokens"].tolist()}
        for one in found["segments"][0]
    ]


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
