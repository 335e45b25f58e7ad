"""Finds the attention layers of a checkpoint without its weights: by watching a model without memory run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from slotline.plugins.model_families import binding, checkpoint, kv_scales, rope
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.model_family import ModelFacts, ModelParts
from slotline.registry.errors import ModelError

INSPECT_NAME = "slotline_inspect"
"""The recording attention function's name in transformers' configurations."""

PROBE_TOKENS = 2


@define(eq=False)
class Recorder:
    """The slot of every attention module while the model is watched; collects layers in call order."""

    names: dict[torch.nn.Module, str]
    max_model_len: int
    layers: list[AttentionLayer] = field(factory=list)
    callers: list[torch.nn.Module] = field(factory=list)

    def record(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        asked: dict[str, Any],
    ) -> None:
        """Note one call; heads and sizes come from the tensors, the rest from what the module asked for."""
        if any(module is caller for caller in self.callers):
            raise ModelError(
                f"module {self.names[module]!r} calls attention more than once in a forward",
                fix="use a model family plugin that serves this architecture",
            )
        scale = asked.get("scaling")
        window = asked.get("sliding_window")
        if window is not None and window >= self.max_model_len:
            window = None  # it never hides a key, so every cache and backend will do
        self.callers.append(module)
        self.layers.append(
            AttentionLayer(
                name=self.names[module],
                index=len(self.layers),
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_size=query.shape[3],
                head_size_v=value.shape[3],
                scale=float(scale if scale is not None else 1 / math.sqrt(query.shape[3])),
                # transformers lets query i see keys j with i - W < j <= i: W keys, its own included.
                window=window,
                soft_cap=asked.get("softcap"),
                sinks=asked.get("s_aux") is not None,
                kv_kind="full" if window is None else "sliding",
            )
        )


def recording_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """Attention that computes nothing: notes the call, returns an empty tensor [1, num_tokens, num_heads, size]."""
    module.slotline_slot.record(module, query, key, value, asked)
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3])), None


def inspect(path: Path) -> ModelFacts:
    """Look at a checkpoint without reading weights.

    Raises:
        ModelError: if the folder is no checkpoint of a served architecture.
    """
    found = checkpoint.read(path)
    checkpoint.require_weights(path)
    return facts_of(found)


def facts_of(found: Checkpoint) -> ModelFacts:
    """The facts of a decoder's configuration."""
    model = _model_without_memory(found)
    layers = _watch(model, found.max_model_len)
    return ModelFacts(
        architecture=found.architecture,
        path=found.path,
        vocab_size=int(found.config.vocab_size),
        hidden_size=int(found.config.hidden_size),
        max_model_len=found.max_model_len,
        dtype=found.dtype,
        layers=layers,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        eos_token_ids=found.eos_token_ids,
        tasks=found.tasks,
        parts=_parts(model, layers),
        kv_scales=kv_scales.read(found.path, layers),
    )


def _model_without_memory(found: Checkpoint) -> Any:
    """The model on the meta device: shapes and dtypes, no storage."""
    binding.register(INSPECT_NAME, recording_attention)
    config = found.config
    config._attn_implementation = INSPECT_NAME
    config._experts_implementation = "batched_mm"  # the only expert loop whose shapes do not depend on routing
    with torch.device("meta"):
        return found.model_class(config).eval()


def _watch(model: Any, max_model_len: int) -> tuple[AttentionLayer, ...]:
    recorder = Recorder({module: name for name, module in model.named_modules()}, max_model_len)
    for module in model.modules():
        setattr(module, binding.SLOT_ATTRIBUTE, recorder)
    rope.freeze(model, max_model_len)  # the choice of frequencies would read positions, which have no values here
    tokens = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device="meta")  # [1, PROBE_TOKENS]
    with torch.no_grad():
        model.base_model(input_ids=tokens, position_ids=tokens, use_cache=False)
    return tuple(recorder.layers)


def _parts(model: Any, layers: tuple[AttentionLayer, ...]) -> ModelParts:
    """What can lie on devices of its own: the embedding, each decoder layer, the final norm with a head."""
    base = model.base_model  # the model itself where it has no head
    heads = () if model is base else [child for child in model.children() if child is not base]
    owners = {module: number for number, layer in enumerate(base.layers) for module in layer.modules()}
    return ModelParts(
        embedding=_count(base.get_input_embeddings()),
        layers=tuple(map(_count, base.layers)),
        head=_count(base.norm) + sum(map(_count, heads)),
        attention=tuple(owners[model.get_submodule(layer.name)] for layer in layers),
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
