"""Mixtures that are computed expert by expert, and their activations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch.nn import functional

from slotline.registry.contracts.experts import ExpertsContext


class ExpertByExpert(ABC):
    """Mixture in which each chosen expert is two products. See `slotline.registry.contracts.experts.Experts`."""

    def __init__(self, context: ExpertsContext) -> None:
        self._context = context

    def apply(
        self,
        x: torch.Tensor,
        packed: Mapping[str, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in topk_ids.unique().tolist():
            if expert >= self._context.experts:
                continue
            token, place = torch.where(topk_ids == expert)
            inner = self._of_expert(x[token], packed, "gate_up", expert)
            out = self._of_expert(activate(inner, self._context).contiguous(), packed, "down", expert)
            total.index_add_(0, token, out.float() * topk_weights[token, place, None].float())
        return total.to(x.dtype)

    def _of_expert(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], name: str, expert: int) -> torch.Tensor:
        first = len(name) + 1
        own = {key[first:]: tensor[expert] for key, tensor in packed.items() if key.startswith(f"{name}_")}
        return self._product(name, x, own, own.pop("bias", None))

    @abstractmethod
    def _product(
        self, name: str, x: torch.Tensor, packed: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the product ``gate_up`` or ``down`` of one expert with its bias."""


def activate(inner: torch.Tensor, context: ExpertsContext) -> torch.Tensor:
    """Return the input of the second product [n, out_features / 2] from the output of the first."""
    gate, up = (inner[..., ::2], inner[..., 1::2]) if context.interleaved else inner.chunk(2, -1)
    if context.activation == "swiglu_oai":
        limit, alpha = context.constants["limit"], context.constants["alpha"]
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if context.activation in ("gelu", "gelu_tanh"):
        approximate = "tanh" if context.activation == "gelu_tanh" else "none"
        return functional.gelu(gate, approximate=approximate) * up
    return (functional.relu(gate) if context.activation == "relu" else functional.silu(gate)) * up
