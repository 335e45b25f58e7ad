"""Tiny random checkpoints of every served family, and what transformers itself answers on them.

Weights are wide (initializer_range 0.15), so that one lost key moves the logits by whole units, and every configuration
is small enough that a test costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import field, frozen
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 384
WINDOW = 8
MAX_LEN = 512

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LATENT: Mapping[str, Any] = {
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
    "routed_scaling_factor": 1.5,
}
_INDEX: Mapping[str, Any] = {**_LATENT, "index_topk": 12, "index_n_heads": 16, "index_head_dim": 16}
"""So many heads that hardly a score is 0, as it is where each head's product is negative: equal scores have no order
in transformers."""
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


@frozen(kw_only=True)
class TinyFamily:
    """How to build one family, and what its attention layers must look like.

    Attributes:
        architecture: the transformers class.
        config: the configuration class.
        settings: what differs from the common sizes.
        windows: the window of each layer.
        soft_cap: of the attention scores.
        sinks: whether layers learn sink logits.
        slopes: of ALiBi, head by head.
        without: common sizes that the configuration has no place for.
    """

    architecture: str
    config: str
    settings: Mapping[str, Any] = field(factory=dict)
    windows: tuple[int | None, ...] = (None,) * 4
    soft_cap: float | None = None
    sinks: bool = False
    slopes: tuple[float, ...] | None = None
    without: tuple[str, ...] = ()


_FAMILIES: Mapping[str, TinyFamily] = {
    "llama": TinyFamily(  # most tests' model: half of the layers, whose blocks take as many bytes
        architecture="LlamaForCausalLM",
        config="LlamaConfig",
        settings={"num_hidden_layers": 2, "head_dim": 32},
        windows=(None, None),
    ),
    "llama_deep": TinyFamily(architecture="LlamaForCausalLM", config="LlamaConfig"),  # for stages and inner states
    "llama_tied": TinyFamily(
        architecture="LlamaForCausalLM", config="LlamaConfig", settings={"tie_word_embeddings": True}
    ),
    "qwen2": TinyFamily(architecture="Qwen2ForCausalLM", config="Qwen2Config"),
    "qwen2_sliding": TinyFamily(
        architecture="Qwen2ForCausalLM",
        config="Qwen2Config",
        settings={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        windows=(None, None, WINDOW, WINDOW),
    ),
    "qwen3": TinyFamily(architecture="Qwen3ForCausalLM", config="Qwen3Config"),
    "llama4": TinyFamily(
        architecture="Llama4ForCausalLM",
        config="Llama4TextConfig",
        settings={
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "deepseek_v2": TinyFamily(
        architecture="DeepseekV2ForCausalLM",
        config="DeepseekV2Config",
        settings={**_LATENT, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    ),
    "deepseek_v2_lite": TinyFamily(
        architecture="DeepseekV2ForCausalLM",
        config="DeepseekV2Config",
        settings={**_LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    ),
    "deepseek_v3": TinyFamily(
        architecture="DeepseekV3ForCausalLM",
        config="DeepseekV3Config",
        settings={
            **_LATENT,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": MAX_LEN // 4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek_v32": TinyFamily(
        architecture="DeepseekV32ForCausalLM",
        config="DeepseekV32Config",
        settings={**_INDEX, "n_group": 2, "topk_group": 1},
    ),
    "glm_moe_dsa": TinyFamily(
        architecture="GlmMoeDsaForCausalLM",
        config="GlmMoeDsaConfig",
        settings={**_INDEX, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "glm4_moe_lite": TinyFamily(
        architecture="Glm4MoeLiteForCausalLM",
        config="Glm4MoeLiteConfig",
        settings={**_LATENT, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    ),
    "minicpm3": TinyFamily(
        architecture="MiniCPM3ForCausalLM",
        config="MiniCPM3Config",
        settings={**_LATENT, "scale_emb": 2, "dim_model_base": 32},
    ),
    "youtu": TinyFamily(architecture="YoutuForCausalLM", config="YoutuConfig", settings=_LATENT),
    "mistral": TinyFamily(
        architecture="MistralForCausalLM",
        config="MistralConfig",
        settings={"sliding_window": WINDOW},
        windows=(WINDOW,) * 4,
    ),
    "gemma2": TinyFamily(
        architecture="Gemma2ForCausalLM",
        config="Gemma2Config",
        settings={
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": True,
        },
        windows=(WINDOW, None) * 2,
        soft_cap=5.0,
    ),
    "gemma3": TinyFamily(
        architecture="Gemma3ForCausalLM",
        config="Gemma3TextConfig",
        settings={
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        },
        windows=(WINDOW, None) * 2,
    ),
    "gemma3n": TinyFamily(
        architecture="Gemma3nForCausalLM",
        config="Gemma3nTextConfig",
        settings={
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "intermediate_size": [96] * 6,
            "activation_sparsity_pattern": [0.5] + [0.0] * 5,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": True,
        },
        windows=(WINDOW, None) * 3,
    ),
    "gemma4": TinyFamily(
        architecture="Gemma4ForCausalLM",
        config="Gemma4TextConfig",
        settings={
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "global_head_dim": 24,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": True,
        },
        windows=(WINDOW, None) * 3,
    ),
    "phi3": TinyFamily(
        architecture="Phi3ForCausalLM",
        config="Phi3Config",
        settings={"sliding_window": WINDOW, "original_max_position_embeddings": MAX_LEN},
        windows=(WINDOW,) * 4,
    ),
    "gpt_oss": TinyFamily(
        architecture="GptOssForCausalLM",
        config="GptOssConfig",
        settings={
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": MAX_LEN // 4,
            },
        },
        windows=(WINDOW, None) * 2,
        sinks=True,
    ),
    "mixtral": TinyFamily(
        architecture="MixtralForCausalLM",
        config="MixtralConfig",
        settings={"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": TinyFamily(
        architecture="Qwen3MoeForCausalLM",
        config="Qwen3MoeConfig",
        settings={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "glm4_moe": TinyFamily(
        architecture="Glm4MoeForCausalLM",
        config="Glm4MoeConfig",
        settings={
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
    "olmo2": TinyFamily(architecture="Olmo2ForCausalLM", config="Olmo2Config"),
    "granite": TinyFamily(
        architecture="GraniteForCausalLM",
        config="GraniteConfig",
        settings={
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "starcoder2": TinyFamily(
        architecture="Starcoder2ForCausalLM",
        config="Starcoder2Config",
        settings={"sliding_window": WINDOW},
        windows=(WINDOW,) * 4,
    ),
}

LATENT_FAMILIES = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
"""The families with multi-head latent attention."""
INDEXED_FAMILIES = ("deepseek_v32", "glm_moe_dsa")
"""The families with latents and an index that picks keys."""
SHARING_FAMILIES = ("gemma3n", "gemma4")
"""The families some of whose layers read the caches of others."""
_APART = ("llama4", "llama_deep", *SHARING_FAMILIES, *LATENT_FAMILIES, *INDEXED_FAMILIES)
FAMILIES: tuple[str, ...] = tuple(name for name in _FAMILIES if name not in _APART)
"""The names that `build` knows, but for those whose attention not every backend has."""

_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_STATE_FAMILIES: Mapping[str, TinyFamily] = {
    "mamba2": TinyFamily(
        architecture="Mamba2ForCausalLM",
        config="Mamba2Config",
        settings={"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 16},
        windows=(),
    ),
    "bamba": TinyFamily(
        architecture="BambaForCausalLM",
        config="BambaConfig",
        settings={**_MAMBA2, "attn_layer_indices": [1, 3]},
        windows=(None,) * 2,
    ),
    "mamba": TinyFamily(
        architecture="MambaForCausalLM",
        config="MambaConfig",
        settings={"state_size": 16, "time_step_rank": 4, "expand": 2},
        windows=(),
    ),
    "falcon_mamba": TinyFamily(
        architecture="FalconMambaForCausalLM",
        config="FalconMambaConfig",
        settings={"state_size": 16, "time_step_rank": 4, "expand": 2},
        windows=(),
    ),
    "jamba": TinyFamily(
        architecture="JambaForCausalLM",
        config="JambaConfig",
        settings={
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        windows=(None,) * 2,
    ),
    "falcon_h1": TinyFamily(
        architecture="FalconH1ForCausalLM",
        config="FalconH1Config",
        settings={
            **_MAMBA2,
            "mamba_d_ssm": 128,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.3],
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.9,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9,
            "key_multiplier": 0.8,
            "embedding_multiplier": 1.4,
            "lm_head_multiplier": 0.6,
        },
    ),
    "granite_moe_hybrid": TinyFamily(
        architecture="GraniteMoeHybridForCausalLM",
        config="GraniteMoeHybridConfig",
        settings={
            **_MAMBA2,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
        windows=(None,) * 2,
    ),
    "nemotron_h": TinyFamily(
        architecture="NemotronHForCausalLM",
        config="NemotronHConfig",
        settings={
            "layers_block_type": ["mamba", "attention", "mamba", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 48,
        },
        windows=(None,),
    ),
    "zamba2": TinyFamily(
        architecture="Zamba2ForCausalLM",
        config="Zamba2Config",
        settings={
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "mamba_ngroups": 2,
            "chunk_size": 16,
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"],
            "attention_head_dim": 32,
            "time_step_min": 1e-30,
            "num_mem_blocks": 2,  # the third and fourth hybrid layers share the first two's attention
        },
        windows=(None,) * 4,
    ),
    "lfm2": TinyFamily(
        architecture="Lfm2ForCausalLM",
        config="Lfm2Config",
        settings={"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
        windows=(None,) * 2,
    ),
    "qwen3_next": TinyFamily(
        architecture="Qwen3NextForCausalLM",
        config="Qwen3NextConfig",
        settings={
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
        windows=(None,) * 2,
    ),
    "recurrent_gemma": TinyFamily(
        architecture="RecurrentGemmaForCausalLM",
        config="RecurrentGemmaConfig",
        settings={
            "block_types": ["recurrent", "attention"],
            "attention_window_size": WINDOW,
            "logits_soft_cap": 6.0,
            "w_init_variance_scale": 1.0,
            "tie_word_embeddings": True,
        },
        windows=(WINDOW,) * 2,
    ),
}

_SLOPES = (0.25, 0.0625, 0.015625, 0.00390625)
_OWN_FAMILIES: Mapping[str, TinyFamily] = {
    "bloom": TinyFamily(
        architecture="BloomForCausalLM",
        config="BloomConfig",
        settings={"n_layer": 4, "n_head": 4, "seq_length": MAX_LEN},
        slopes=_SLOPES,
        without=("num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    ),
    "falcon": TinyFamily(
        architecture="FalconForCausalLM",
        config="FalconConfig",
        settings={"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        slopes=tuple(slope / 4 for slope in _SLOPES),  # the square root of the head's size
        without=("head_dim",),
    ),
    "falcon_rotary": TinyFamily(
        architecture="FalconForCausalLM",
        config="FalconConfig",
        settings={"new_decoder_architecture": True, "num_kv_heads": 2},
        without=("head_dim",),
    ),
    "falcon_multi_query": TinyFamily(
        architecture="FalconForCausalLM", config="FalconConfig", settings={"alibi": False}, without=("head_dim",)
    ),
    "mpt": TinyFamily(
        architecture="MptForCausalLM",
        config="MptConfig",
        settings={"d_model": 48, "n_heads": 3, "n_layers": 4, "max_seq_len": MAX_LEN, "attn_config": {"clip_qkv": 2.0}},
        slopes=(0.0625, 0.00390625, 0.25),
        without=("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    ),
}

OWN_FAMILIES: tuple[str, ...] = tuple(_OWN_FAMILIES)
"""The families whose attention transformers computes inside their modules."""

STATE_FAMILIES: tuple[str, ...] = tuple(_STATE_FAMILIES)
"""The families with state layers."""

_LINES = (
    "def main(argv):",
    "    return sum(int(word) for word in argv)",
    "The quick brown fox jumps over the lazy dog.",
    "import os, sys, json",
    "class Row: pass",
)


def family(name: str) -> TinyFamily:
    """What is known of a family."""
    return {**_FAMILIES, **_OWN_FAMILIES, **_STATE_FAMILIES}[name]


def build(name: str, path: Path, seed: int = 0, architecture: str = "", **settings: Any) -> Path:
    """Write a random checkpoint of a family with a tokenizer into `path`; `settings` override the configuration.

    `architecture` names another transformers class than the family's causal language model.
    """
    known = family(name)
    sizes = {name: size for name, size in _SIZES.items() if name not in known.without}
    config = getattr(transformers, known.config)(**{**sizes, **known.settings, **settings})
    torch.manual_seed(seed)
    model = getattr(transformers, architecture or known.architecture)(config)
    _widen(model)
    if model.can_generate():
        model.generation_config.eos_token_id = config.eos_token_id
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    build_tokenizer(path)
    return path


def build_tokenizer(path: Path) -> Path:
    """Write a byte-level BPE tokenizer of at most `VOCAB_SIZE` tokens into `path`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(path)
    return path


def greedy_reference(path: Path, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """The tokens that transformers' greedy generation adds to a prompt, float32 and eager attention."""
    model = known_oracle(path)
    prompt = torch.tensor([prompt_ids])  # [1, len(prompt_ids)]
    with torch.no_grad():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt_ids) :]]


def logits_reference(path: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits [len(token_ids), vocab_size] at every position, float32 and eager attention."""
    with torch.no_grad():
        logits: torch.Tensor = known_oracle(path)(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def oracle(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint in transformers, in float32 unless said."""
    attention = attention_of(path)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    ).eval()


def known_oracle(path: Path) -> Any:
    """Return `oracle(path)`, loaded once for each state of the folder's files. Callers must not change it."""
    written = tuple((file.name, file.stat().st_mtime_ns) for file in sorted(path.iterdir()))
    model = _kept_oracle(path, written)
    forget(model)
    return model


@lru_cache(maxsize=16)
def _kept_oracle(path: Path, written: tuple[tuple[str, int], ...]) -> Any:
    return oracle(path)


def attention_of(path: Path) -> str:
    """Which of transformers' attention functions is right: eager, since others may leave out a soft cap; but Falcon's
    eager one adds ALiBi's biases twice, with the scores and with the mask.
    """
    return (
        "sdpa"
        if transformers.AutoConfig.from_pretrained(path, trust_remote_code=False).model_type == "falcon"
        else "eager"
    )


def forget(model: Any) -> None:
    """Drop the states that RecurrentGemma keeps in its modules: a prompt of one token goes on from them otherwise."""
    for module in model.modules():
        for name in ("conv1d_state", "recurrent_states"):
            if hasattr(module, name):
                setattr(module, name, None)


def _widen(model: torch.nn.Module) -> None:
    """Give the parameters that initialisation leaves at 0 or 1 (biases, norms, sinks) values that matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.15)
