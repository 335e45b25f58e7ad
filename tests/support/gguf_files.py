"""Tiny GGUF files, written with the library gguf, and the models that they mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import quantized_checkpoints as forms
import tiny_models
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
BYTES = {"Q4_K": 144, "Q6_K": 210}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def plain(path: Path) -> Path:
    """Write a tiny Llama whose sizes super-blocks of 256 divide."""
    return tiny_models.build("llama", path, 0, **SIZES)


def blocks(weight: np.ndarray, kind: str) -> np.ndarray:
    """Return a weight in blocks; those of the K types, which the library cannot make, at random."""
    if kind not in BYTES:
        return np.asarray(quantize(weight, GGMLQuantizationType[kind]))
    rng = np.random.default_rng(weight.shape[0])
    found = rng.integers(0, 256, (*weight.shape[:1], weight.shape[1] // 256, BYTES[kind]), dtype=np.uint8)
    half = rng.uniform(0.0004, 0.0008, (*found.shape[:2], 2)).astype(np.float16)
    if kind == "Q4_K":
        found[..., :4] = half.view(np.uint8)
    else:
        found[..., 208:] = (half[..., :1] / 8).view(np.uint8)
    return found.reshape(weight.shape[0], -1)


def write(folder: Path, file: Path, meant: Path, kind: str, keys: Mapping[str, Any] | None = None) -> None:
    """Write a Llama's folder as GGUF, as llama.cpp's converter does, and the same model dequantized.

    Some keys may be set to other values, which the dequantized model does not have.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _tokenizer(writer, folder, config["vocab_size"])
    for key, value in (keys or {}).items():
        writer.kv_data[0].pop(key, None)
        {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
            key, value
        )
    dequantized = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own, heads = _name(name), {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        weight = tensor.float().numpy()
        count = next((config[key] for end, key in heads.items() if f".{end}." in name), 0)
        order = np.arange(weight.shape[0])
        if count:  # pairs of neighbours are rotated, not halves
            order = order.reshape(count, 2, -1).swapaxes(1, 2).reshape(-1)
        if weight.ndim == 1:
            writer.add_tensor(own, weight)
            dequantized[name] = tensor.float()
            continue
        packed = blocks(weight[order], kind)
        writer.add_tensor(own, packed, raw_dtype=GGMLQuantizationType[kind])
        back = np.empty_like(weight)
        back[order] = dequantize(packed, GGMLQuantizationType[kind])
        dequantized[name] = torch.from_numpy(back)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    forms.save(meant, dequantized, config)


def _name(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{_NAMES[rest]}.{end}"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem] + f".{end}"


def _tokenizer(writer: GGUFWriter, folder: Path, size: int) -> None:
    said = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = [f"[unused{number}]" for number in range(size)]
    for token, number in said["vocab"].items():
        tokens[number] = token
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * size)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in said["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
