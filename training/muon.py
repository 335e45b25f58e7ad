"""Muon (Jordan 2024), with the step size of Liu et al. 2025 (section 2.2), for stacks of matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly the orthogonal factor of each matrix of [..., n, m]: singular values come between 0.7 and 1.2."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else matrices.dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):  # Newton-Schulz with the author's coefficients
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update has all singular values alike, as long as AdamW's would be.

    Args:
        parameters: matrices, or stacks of them in the last two dimensions.
        lr: as for AdamW; a tensor [] is read at each step.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float | Tensor, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update, Nesterov's way."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(average, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(update * (0.2 * max(parameter.shape[-2:]) ** 0.5 * group["lr"]))
