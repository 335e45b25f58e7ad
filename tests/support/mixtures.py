"""Mixtures with random weights, and tokens for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from tiny_models import family

from slotline.plugins.model_families.tensor_parallel import expert_parallel

EXPERTS, TOP, HIDDEN = 8, 3, 32


def mixture(name: str, form: str) -> Any:
    """Return the first mixture of a tiny model with random weights."""
    known = family(name)
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)
    settings = {k: counts.get(k, v) for k, v in known.settings.items()}
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    config = getattr(transformers, known.config)(**{**settings, **sizes, "vocab_size": 64})
    torch.manual_seed(0)
    model = getattr(transformers, known.architecture)(config)
    found = next(one for one in model.modules() if expert_parallel.is_mixture(one))
    found.config._experts_implementation = form
    for weight in found.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return found.requires_grad_(False)


def routing(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, their experts (the first ones more often) and weights."""
    made = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, EXPERTS, generator=made) + torch.linspace(0.6, 0, EXPERTS)
    return (
        torch.randn(count, HIDDEN, generator=made),
        scores.topk(TOP).indices,
        torch.rand(count, TOP, generator=made),
    )


def close(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
