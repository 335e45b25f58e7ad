"""Tiny text-to-text checkpoints with random weights, and what transformers' own `generate` gives for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import VOCAB_SIZE, build_tokenizer

SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "init_std": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}
T5: dict[str, Any] = {
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "n_positions": 64,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "feed_forward_proj": "gated-gelu",
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
    "m2m100": (transformers.M2M100Config, transformers.M2M100ForConditionalGeneration),
    "marian": (transformers.MarianConfig, transformers.MarianMTModel),
    "mbart": (transformers.MBartConfig, transformers.MBartForConditionalGeneration),
    "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
    "pegasus": (transformers.PegasusConfig, transformers.PegasusForConditionalGeneration),
}


def build(path: Path, family: str = "bart", seed: int = 0, generation: dict[str, Any] | None = None) -> Path:
    """A checkpoint with a tokenizer. The biases of its logits are not zero.

    Args:
        generation: further settings of generation_config.json.
    """
    torch.manual_seed(seed)
    config_class, model_class = CLASSES[family]
    model = model_class(config_class(**SETTINGS, **(T5 if family == "t5" else {}))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "relative_attention_bias" in name:
                weight.normal_(std=2)
            if name.endswith(("o.weight", "wo.weight")):  # T5's last matrices
                weight.mul_(4)
        scale = 0.1 if family == "t5" else 8  # T5's are those of the logits too
        model.get_decoder().embed_tokens.weight.mul_(scale)  # or outputs repeat one token
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_(std=0.1)
    model.generation_config.update(**generation or {})
    model.save_pretrained(path)
    build_tokenizer(path)
    return path


@cache
def oracle(path: Path) -> Any:
    """transformers' model of a checkpoint, in eager attention."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        path, attn_implementation="eager", trust_remote_code=False
    )
    return model.eval()


def by_transformers(path: Path, encoder: list[int], decoder: list[int], max_tokens: int, **settings: Any) -> Any:
    """What `generate` gives for one prompt, with `scores` of each token."""
    with torch.no_grad():
        return oracle(path).generate(
            torch.tensor([encoder]),
            attention_mask=torch.ones((1, len(encoder)), dtype=torch.int64),
            decoder_input_ids=torch.tensor([decoder]),
            max_new_tokens=max_tokens,
            return_dict_in_generate=True,
            output_scores=True,
            **{"do_sample": False, "num_beams": 1, **settings},
        )


def greedy_reference(path: Path, encoder: list[int], decoder: list[int], max_tokens: int) -> list[int]:
    """The tokens that greedy generation adds, through end tokens."""
    found = by_transformers(path, encoder, decoder, max_tokens, eos_token_id=None)
    tokens: list[int] = found.sequences[0, len(decoder) :].tolist()
    return tokens
