"""BLOOM, Falcon and MPT, whose attention transformers computes inside their modules, mostly with ALiBi.

Other decoders look up an attention function by name. Here bound classes replace transformers' own, with the same
parameters. Attention passes queries, keys and values to the function, and the decoder builds neither biases nor masks.
Slopes are derived from the biases that transformers' functions return for two neighbouring keys.

transformers rounds Falcon's biases to bfloat16, position by position. Here the slopes are rounded, and distances are
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Outputs
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.mpt import modeling_mpt as mpt

from slotline.registry.errors import ModelError

Attention = Callable[..., tuple[torch.Tensor, None]]
"""An attention function as transformers calls it: module, query, key, value [1, heads, num_tokens, size], options."""

MPT_SETTINGS: Mapping[str, Any] = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
}
"""What transformers' MPT computes, whatever `attn_config` says."""


def adopt(hf_model: Any, function: Attention) -> Any:
    """Return the model. If it is one of these, its attention calls `function` afterwards."""
    for module in hf_model.modules():
        bound = BOUND.get(type(module))
        if bound is not None:
            module.__class__ = bound
        if isinstance(module, (BoundBloomAttention, BoundFalconAttention, BoundMptAttention)):
            module.attention, module.slopes = function, _slopes(module, hf_model.config)
    return hf_model


def is_bound(hf_model: Any) -> bool:
    """Return True if a model's decoder is one of these."""
    return isinstance(hf_model.base_model, (BoundBloom, BoundFalcon, BoundMpt))


def refuse_ignored_settings(path: Path, config: Any) -> None:
    """Refuse an MPT checkpoint that asks for what transformers' class leaves out.

    Raises:
        ModelError: with the settings.
    """
    if config.model_type != "mpt":
        return
    asked = {name: getattr(config.attn_config, name) for name in MPT_SETTINGS}
    others = [f"attn_config.{name} = {value!r}" for name, value in asked.items() if value != MPT_SETTINGS[name]]
    others += [] if config.logit_scale is None else [f"logit_scale = {config.logit_scale!r}"]
    others += [] if config.no_bias else ["no_bias = False"]
    if others:
        raise ModelError(
            f"{path} sets {', '.join(others)}, which transformers' MPT leaves out",
            fix="use a checkpoint without these, or a plugin that serves them",
        )


def _slopes(module: Any, config: Any) -> tuple[float, ...] | None:
    """Return each head's ALiBi slope, None for Falcons with rotary positions."""
    if isinstance(module, BoundMptAttention):
        biases = mpt.build_mpt_alibi_tensor(module.n_heads, 2)  # [num_heads, 1, 2]
        return tuple((biases[:, 0, 1] - biases[:, 0, 0]).tolist())
    if isinstance(module, BoundFalconAttention) and not config.alibi:
        return None
    ones = torch.ones((1, 2), dtype=torch.int64)
    if isinstance(module, BoundBloomAttention):
        biases = bloom.build_alibi_tensor(ones, module.num_heads, torch.float32)
        return tuple(biases[:, 0, 1].tolist())
    biases = falcon.build_alibi_tensor(ones, module.num_heads, torch.float32)
    return tuple((biases[:, 0, 1].double() * module.inv_norm_factor).tolist())  # it scales scores and biases alike


class BoundBloomAttention(bloom.BloomAttention):  # type: ignore[misc]
    """BLOOM's projections around an attention function."""

    attention: Attention
    slopes: tuple[float, ...]

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, **_options: Any
    ) -> tuple[torch.Tensor, None]:
        """Return the residual plus the output of attention, [1, num_tokens, hidden_size]."""
        states = self._reshape(self.query_key_value(hidden_states))
        out, _ = self.attention(self, *states, scaling=self.inv_norm_factor, alibi_slopes=self.slopes)
        return residual + self.dense(out.flatten(2)), None


class BoundBloom(bloom.BloomModel):  # type: ignore[misc]
    """BLOOM's decoder, with `layers` and `norm` under the names of other decoders."""

    layers = property(lambda self: self.h)
    norm = property(lambda self: self.ln_f)

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **_: Any
    ) -> Outputs:
        """Return hidden states [1, num_tokens, hidden_size] of tokens or their embeddings."""
        embeddings = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states = self.word_embeddings_layernorm(embeddings)
        for block in self.h:
            hidden_states = block(hidden_states, alibi=None, attention_mask=None)[0]
        return Outputs(last_hidden_state=self.ln_f(hidden_states))


class BoundFalconAttention(falcon.FalconAttention):  # type: ignore[misc]
    """Falcon's projections around an attention function, with as many KV heads as it has weights for."""

    attention: Attention
    slopes: tuple[float, ...] | None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        **_options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the output of attention, [1, num_tokens, hidden_size].

        Position embeddings are None for models with slopes.
        """
        query, key, value = (part.transpose(1, 2) for part in self._heads(self.query_key_value(hidden_states)))
        if position_embeddings is not None:
            query, key = falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
        out, _ = self.attention(self, query, key, value, scaling=self.inv_norm_factor, alibi_slopes=self.slopes)
        return self.dense(out.flatten(2)), None

    def _heads(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [1, num_tokens, num_heads, size], keys and values [1, num_tokens, num_kv_heads, size].

        These are views. transformers' own split indexes by lists, which copies from the host.
        """
        if not self.new_decoder_architecture and self.multi_query:
            heads = states.unflatten(2, (-1, self.head_dim))
            return heads[..., :-2, :], heads[..., -2:-1, :], heads[..., -1:, :]
        if not self.new_decoder_architecture:
            heads = states.unflatten(2, (self.num_heads, 3, self.head_dim))
            return heads[..., 0, :], heads[..., 1, :], heads[..., 2, :]
        groups = states.unflatten(2, (self.num_kv_heads, -1, self.head_dim))  # the queries of a KV head, key, value
        return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]


class BoundFalcon(falcon.FalconModel):  # type: ignore[misc]
    """Falcon's decoder, with `layers` and `norm` under the names of other decoders."""

    layers = property(lambda self: self.h)
    norm = property(lambda self: self.ln_f)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> Outputs:
        """Return hidden states [1, num_tokens, hidden_size] of tokens or embeddings at positions [1, num_tokens]."""
        hidden_states = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        embeddings = None if self.use_alibi else self.rotary_emb(hidden_states, position_ids=position_ids)
        for block in self.h:
            hidden_states = block(hidden_states, alibi=None, attention_mask=None, position_embeddings=embeddings)[0]
        return Outputs(last_hidden_state=self.ln_f(hidden_states))


class BoundMptAttention(mpt.MptAttention):  # type: ignore[misc]
    """MPT's projections around an attention function."""

    attention: Attention
    slopes: tuple[float, ...]

    def forward(self, hidden_states: torch.Tensor, **_options: Any) -> tuple[torch.Tensor, None]:
        """Return the output of attention, [1, num_tokens, hidden_size]."""
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        states = (part.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2))
        out, _ = self.attention(self, *states, scaling=self.softmax_scale, alibi_slopes=self.slopes)
        return self.out_proj(out.flatten(2)), None


class BoundMpt(mpt.MptModel):  # type: ignore[misc]
    """MPT's decoder, with `layers` and `norm` under the names of other decoders."""

    layers = property(lambda self: self.blocks)
    norm = property(lambda self: self.norm_f)

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **_: Any
    ) -> Outputs:
        """Return hidden states [1, num_tokens, hidden_size] of tokens or their embeddings."""
        hidden_states = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            hidden_states = block(hidden_states, position_bias=None, attention_mask=None)[0]
        return Outputs(last_hidden_state=self.norm_f(hidden_states))


BOUND: Mapping[type, type] = {
    falcon.FalconLinear: torch.nn.Linear,  # the same product, under the type that adapters and passes know
    bloom.BloomAttention: BoundBloomAttention,
    bloom.BloomModel: BoundBloom,
    falcon.FalconAttention: BoundFalconAttention,
    falcon.FalconModel: BoundFalcon,
    mpt.MptAttention: BoundMptAttention,
    mpt.MptModel: BoundMpt,
}
"""transformers' class to the one that takes its place."""
