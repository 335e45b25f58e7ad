"""Tiny encoders with a tokenizer of words, and transformers' answers for pooling tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "the", "cat", "dog", "sat", "on", "a", "mat", "query", "passage"]
WORDS += [":", ".", "yes", "no"]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def bert(path: Path, architecture: str, **settings: Any) -> Path:
    """A tiny random checkpoint of an encoder, with a tokenizer that gives the second text of a pair type 1."""
    torch.manual_seed(0)
    cls = getattr(transformers, architecture)
    cls(cls.config_class(**{**SIZES, **settings})).eval().save_pretrained(path)
    words = path / "vocab.txt"
    words.write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(path)
    return path


@cache
def hf_model(path: Path, auto_class: str) -> Any:
    """transformers' own model."""
    found = getattr(transformers, auto_class)
    model = found.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False)
    return model.eval().requires_grad_(False)


def llama_states(path: Path, prompt: list[int]) -> torch.Tensor:
    """transformers' last hidden states [len(prompt), hidden_size] of one prompt alone."""
    with torch.no_grad():
        states: torch.Tensor = hf_model(path, "AutoModel")(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
    return states
