"""Settings of small models for `families_sweep`: what some families need beside the sizes of all."""

from __future__ import annotations

from typing import Any

VOCAB, LAYERS, HIDDEN = 256, 4, 64

COMMON: dict[str, Any] = {
    "initializer_range": 0.15,
    "init_std": 0.15,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""Settings of all that have them."""

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "depth": 2,
    "num_heads": 2,
    "embed_dim": 32,
    "out_hidden_size": HIDDEN,
    "vision_output_dim": HIDDEN,
    "projector_hidden_size": 32,
    "projection_dim": HIDDEN,
    "head_dim": 16,
    "layers": 2,
    "num_layers": 2,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
}

"""Sizes of encoders of images and sound."""

_MAMBA: dict[str, Any] = {
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 16,
    "chunk_size": 16,
    "expand": 2,
}
_MLA: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
PATCHES: dict[str, dict[str, Any]] = {
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "mpt": {"d_model": 48, "n_heads": 3},
    "mamba2": _MAMBA,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "sarvam_mla": _MLA,
    "youtu": _MLA,
    "glm4_moe_lite": _MLA,
    "minicpm3": _MLA,
    "deepseek_v32": _MLA,
    "glm_moe_dsa": _MLA,
    "longcat_flash": _MLA,
    "axk1": _MLA,
    "axk2": _MLA,
    "bailing_hybrid": {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "layer_group_size": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "kimi_linear": {
        "num_key_value_heads": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 2},
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "xlstm": {"num_blocks": LAYERS, "embedding_dim": HIDDEN, "chunk_size": 16, "autocast_kernel_dtype": "float32"},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 128, "key_multiplier": 0.8, "lm_head_multiplier": 0.6},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "w_init_variance_scale": 1.0},
    "zamba2": {
        "attention_head_dim": 32,
        "num_hidden_layers": 6,
        "time_step_min": 1e-30,
        "num_mem_blocks": 2,
        "n_mamba_heads": 8,
        "attention_hidden_size": ...,
        "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"],
        "head_dim": ...,
    },
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mamba", "moe"]},
    "lfm2": {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "zamba": {
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "n_mamba_heads": 2,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "head_dim": ...,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.5] + [0.0] * 5,
    },
    "gemma4_text": {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
}
"""Settings by model type over the small ones. A value of ... leaves the key at its default."""

ENCODERS_AS_DECODERS = frozenset(
    {
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
        "reformer",
    }
)
"""Model types whose classes are decoders only if their configuration says so."""
