"""What a GGUF file says of its model beside the tensors: keys that are read, that agree anyway, and that are refused.

transformers reads the keys of its table and passes over all others, so that a file's scaled positions, windows or
factors would be left out without a word. The keys are those of llama.cpp's ``gguf-py/gguf/constants.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slotline.registry.errors import ModelError

_NAMES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
"""Architectures under the names that transformers' table has for them."""
_ELSEWHERE = {"gpt-oss": ("rope.scaling.",)}
"""Beginnings of keys that transformers reads beside its table."""
_SILENT = {
    "context_length",
    "vocab_size",
    "tensor_data_layout",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
"""Keys that say nothing more than others, or nothing of the network."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "general.type": ("model",),
        "general.quantization_version": (2,),
        "split.count": (0, 1),
        "adapter.type": (),
        "rope.scaling.type": ("none",),
        "rope.scaling.factor": (1.0,),
        "rope.scaling.attn_factor": (1.0,),
        "rope.scale_linear": (1.0,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "nextn_predict_layers": (0,),
        "attention.causal": (True,),
        "attention.max_alibi_bias": (0.0,),
        "attention.clamp_kqv": (0.0,),
        "logit_scale": (1.0,),
        "embedding_scale": (1.0,),
        "residual_scale": (1.0,),
    }
)
"""Keys that change the network, with the values for which they do not."""


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _turned(config: Any) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    part = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(_head_size(config) * part)


def _theta(config: Any) -> Any:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or getattr(config, "rope_theta", None)


def _first(*names: str) -> Callable[[Any], Any]:
    """Return a function that reads the first of some attributes that a configuration has."""
    return lambda config: next((getattr(config, name) for name in names if hasattr(config, name)), None)


_AGREES: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "rope.dimension_count": _turned,
        "rope.freq_base": _theta,
        "attention.key_length": _head_size,
        "attention.value_length": _head_size,
        "attention.scale": lambda config: _head_size(config) ** -0.5,
        "attention.sliding_window": _first("sliding_window"),
        "attn_logit_softcapping": _first("attn_logit_softcapping"),
        "final_logit_softcapping": _first("final_logit_softcapping"),
        "feed_forward_length": lambda config: getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "expert_feed_forward_length": _first("moe_intermediate_size", "intermediate_size"),
        "expert_shared_feed_forward_length": _first("shared_expert_intermediate_size"),
        "expert_weights_norm": _first("norm_topk_prob"),
        "use_parallel_residual": _first("use_parallel_residual"),
    }
)
"""Keys that transformers does not read of each architecture, and what the model has all the same."""


def refuse_ignored(path: Path, keys: Iterable[str], value_of: Callable[[str], Any], config: Any) -> None:
    """Refuse a file with a key that would change its model, and that nothing reads.

    Args:
        path: the file, for messages.
        keys: of the file.
        value_of: gives a key's value.
        config: the configuration that transformers made of the file.

    Raises:
        ModelError: naming the key and its value.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    architecture = value_of("general.architecture")
    table = GGUF_CONFIG_MAPPING.get(_NAMES.get(architecture, architecture), {})
    for key in keys:
        own = key.removeprefix(f"{architecture}.")
        if own == key and key not in _NEUTRAL:
            continue  # of the tokenizer, or of the file
        if table.get(own) is not None or own in _SILENT or own.startswith(_ELSEWHERE.get(architecture, "\n")):
            continue
        value = value_of(key)
        if own in _NEUTRAL:
            fits = value in _NEUTRAL[own]
        else:
            expected = _AGREES[own](config) if own in _AGREES else None
            fits = expected is not None and _equal(value, expected)
        if not fits:
            raise ModelError(
                f"{path}: its key {key} = {value!r} would change the model, and is not read",
                fix="use the checkpoint as its makers published it",
            )


def _equal(value: Any, expected: Any) -> bool:
    """Return True if a key's value is the expected one, as float32 stores it."""
    if isinstance(value, float) and isinstance(expected, int | float):
        return abs(value - expected) <= 1e-6 * abs(expected)
    return bool(value == expected)
