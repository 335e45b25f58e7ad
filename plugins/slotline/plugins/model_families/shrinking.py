"""Small copies of configurations: the same kinds of layers with few of them, and few numbers in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

LAYERS = 4
WINDOW = 8

WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "local_attention",
    "attention_chunk_size",
)
"""Names of what a query does not see beyond."""

_BY_SIZE: Mapping[int, str] = MappingProxyType(
    {
        64: "hidden_size d_model n_embd embed_dim emb_dim dim embedding_size dim_model attention_hidden_size conv_dim "
        "word_embed_proj_dim lru_width",
        96: "intermediate_size ffn_dim d_ff n_inner dff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim dim_ff d_inner "
        "feed_forward_size intermediate_dim intermediate_size_mlp mlp_hidden_size",
        48: "shared_intermediate_size expert_ffn_hidden_size moe_intermediate_size moe_ffn_hidden_size "
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size expert_intermediate_size",
        LAYERS: "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers "
        "num_decoder_layers num_encoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads "
        "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads mamba_dt_rank "
        "time_step_rank linear_num_heads",
        2: "num_key_value_heads num_kv_heads num_global_key_value_heads swa_num_key_value_heads num_experts_per_tok "
        "num_experts_per_token moe_k moe_topk num_experts_per_topk top_k_experts n_group num_expert_group "
        "index_n_heads linear_num_key_heads mamba_n_groups mamba_expand n_groups mamba_ngroups altup_num_inputs "
        "num_kv_shared_layers",
        1: "moe_num_shared_experts n_shared_experts num_shared_experts topk_group zero_expert_num "
        "first_k_dense_replace num_dense_layers moe_layer_start_index num_mem_blocks",
        16: "head_dim attention_head_dim d_kv kv_channels swa_head_dim qk_nope_head_dim v_head_dim o_lora_rank "
        "index_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_d_state "
        "mamba_chunk_size mamba_head_dim ssm_state_size chunk_size state_size mamba_headdim linear_head_dim",
        24: "global_head_dim kv_lora_rank qk_head_dim",
        20: "q_lora_rank",
        8: "qk_rope_head_dim hidden_size_per_layer_input laurel_rank adapter_rank mamba_n_heads mamba_num_heads "
        "n_mamba_heads",
        256: "vocab_size vocab_size_per_layer_input n_vocab",
        512: "max_position_embeddings n_positions n_ctx max_seq_len seq_length context_length max_sequence_length",
    }
)
SIZES: Mapping[str, int] = MappingProxyType(
    {name: size for size, names in _BY_SIZE.items() for name in names.split()} | dict.fromkeys(WINDOWS, WINDOW)
)
LAYER_NUMBERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
KINDS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")
"""Names of lists with the kind of each layer."""
_KEPT_IF_UNUSED = ("n_group", "topk_group", "q_lora_rank", "num_kv_shared_layers", "global_head_dim", *WINDOWS)


def small_settings(config: Any, sizes: Mapping[str, int] = SIZES) -> dict[str, Any]:
    """Return the settings of a configuration that differ in its small copy, by name."""
    layers = _num_layers(config)
    changed: dict[str, Any] = {}
    for name in _names(config):
        value = _value(config, name)
        if name in KINDS and isinstance(value, list | tuple) and value:
            changed[name] = of_each_kind(value, max(LAYERS, len(set(value))))
        elif name in sizes and not isinstance(value, list | tuple | dict | bool):
            if value or name not in _KEPT_IF_UNUSED:
                changed[name] = sizes[name]
        elif isinstance(value, list | tuple) and len(value) == layers > LAYERS:
            changed[name] = of_each_kind(value, LAYERS) if len(set(map(str, value))) > 1 else list(value)[:LAYERS]
    longest = max((len(changed[name]) for name in KINDS if name in changed), default=LAYERS)
    for name in LAYER_NUMBERS:
        if name in changed:
            changed[name] = longest
    aliases = getattr(type(config), "attribute_map", None) or {}
    return {name: value for name, value in changed.items() if aliases.get(name) not in changed}


def _names(config: Any) -> list[str]:
    """Return the names of a configuration's settings, those without a stated value included."""
    own = type(config)
    aliases = getattr(own, "attribute_map", None) or {}
    names = {*config.to_dict(), *aliases, *getattr(own, "__annotations__", {})}
    parts = getattr(own, "sub_configs", None) or {}
    return sorted(n for n in names if n not in parts and _can_be_set(own, aliases.get(n, n)))


def _can_be_set(config_class: type, name: str) -> bool:
    found = getattr(config_class, name, None)
    return not isinstance(found, property) or found.fset is not None


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # Gemma 4's head_dim, which differs by layer
        return None


def windows(config: Any) -> dict[str, int]:
    """Return small windows and chunks for a configuration that has any."""
    stated = config.to_dict()
    return {name: WINDOW for name in WINDOWS if isinstance(stated.get(name), int) and stated[name]}


def of_each_kind(kinds: Sequence[Any], count: int) -> list[Any]:
    """Return `count` kinds of layers, in turn, so that each is there at least once."""
    different = list(dict.fromkeys(kinds))
    return [different[i % len(different)] for i in range(max(count, len(different)))]


def changed_copy(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a configuration with other settings, checked by its class."""
    stated = config.to_dict()
    for name in ("transformers_version", "model_type", "quantization_config"):
        stated.pop(name, None)
    return type(config)(**(stated | dict(changes)))


def _num_layers(config: Any) -> int:
    return next((v for v in (getattr(config, name, None) for name in LAYER_NUMBERS) if isinstance(v, int)), 0)
