"""Models with random weights made from a configuration, to measure a model whose weights are not at hand."""

from __future__ import annotations

from typing import Any

import torch
from transformers import initialization

from slotline.plugins.model_families import binding, checkpoint, inspection, loading, logit_score, structure
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.quantized import load as quantized
from slotline.registry.contracts.model_family import ModelContext

NOTE = "random weights: load.format = 'dummy' reads none"

_BLOCK = 1 << 20
"""Numbers that are drawn. All weights repeat them, since drawing 8 billion takes a CPU minutes."""


def random_model(context: ModelContext) -> Any:
    """Return a model as `loading.load_transformers_model` does, with seeded random weights.

    It is quantized if the plan says so, and on the device already, unless its parts go to several places.
    """
    found = checkpoint.read(context.facts.path)
    divided = bool(context.stages or context.offload_bytes)
    model = unfilled(found, context.dtype, "cpu" if divided else context.device)
    if context.task != "generate" and hasattr(model, "lm_head"):
        logit_score.replace_head(model, context)
    fill(model, float(getattr(found.config.get_text_config(), "initializer_range", None) or 0.02))
    if (weights := context.weights) is not None:
        quantized.put(model, weights if hasattr(model, "lm_head") else quantized.without_head(weights), context)
    model = structure.find_body(model.eval().requires_grad_(False))
    return inspection.adopted(model, binding.slot_attention)


def unfilled(found: Checkpoint, dtype: str, device: str) -> Any:
    """Return a model of transformers whose weights have any values."""
    binding.register(binding.ATTENTION_NAME, binding.slot_attention)
    with torch.device(device), initialization.no_init_weights():
        model = found.model_class._from_config(
            found.config,
            dtype=loading.torch_dtype(dtype),
            attn_implementation=found.attention(binding.ATTENTION_NAME),
        )
    model.tie_weights()
    return model


def fill(model: torch.nn.Module, scale: float) -> None:
    """Fill all parameters in place: matrices with normal numbers of a standard deviation, norms with 1, biases with 0.

    The numbers hang on the names' order alone, not on the device.
    """
    drawn = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)) * scale  # [_BLOCK] float32
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            block = drawn.roll(index * 7919).to(parameter.device, parameter.dtype)
            flat = parameter.view(-1)
            whole = flat.numel() // _BLOCK * _BLOCK
            flat[:whole].view(-1, _BLOCK).copy_(block)
            flat[whole:].copy_(block[: flat.numel() - whole])
