"""Linear layers whose weight a linear plugin holds and multiplies by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slotline.registry.contracts.linear import Linear


class SlotLinear(nn.Module):
    """Linear layer with a quantized weight. The packed weight is in its buffers, by the plugin's names.

    Attributes:
        in_features, out_features: sizes.
        kernel: the plugin.
        dtype: of activations.
        bias: [out_features] or None.
        rounded_groups: groups of inputs that `forward_rounded` takes with a scale each, 0 if it takes none.
    """

    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, kernel: Linear, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.in_features, self.out_features, self.kernel = in_features, out_features, kernel
        self.register_parameter("bias", bias)
        self._apply_kernel = kernel.apply
        groups = getattr(kernel, "rounded_groups", None)  # of a `RoundedLinear`
        self.rounded_groups: int = 0 if groups is None else groups()

    def hold(self, packed: Mapping[str, torch.Tensor]) -> None:
        """Keep a packed weight."""
        for name, tensor in packed.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """A plain copy of the weight [out_features, in_features], made anew at each access by a product."""
        tensor = next(iter(self._buffers.values()))
        assert tensor is not None
        eye = torch.eye(self.in_features, device=tensor.device)
        return self._apply_kernel(eye.to(self.dtype), self._buffers, self.out_features).T.contiguous()  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        out = self._apply_kernel(rows.contiguous(), self._buffers, self.out_features)  # type: ignore[arg-type]
        return self._biased(out).view(*x.shape[:-1], self.out_features)

    def forward_rounded(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Map inputs that are codes [..., in_features] int8 times scales [n, rounded_groups] to [..., out_features]."""
        kernel: Any = self.kernel
        rows = codes.reshape(-1, self.in_features)
        out = kernel.apply_rounded(rows, scales, self._buffers, self.out_features)
        return self._biased(out).view(*codes.shape[:-1], self.out_features)

    def _biased(self, out: torch.Tensor) -> torch.Tensor:
        bias = self._parameters["bias"]
        return out if bias is None else out + bias

    def extra_repr(self) -> str:
        kernel = type(self.kernel).__name__
        return f"in_features={self.in_features}, out_features={self.out_features}, kernel={kernel}"


class SlotExperts(nn.Module):
    """Mixture of experts with quantized weights, in the place of transformers' module.

    Attributes:
        kernel: the experts plugin.
        gate_up_proj_bias, down_proj_bias: the biases until they are packed, by the names of the files.
    """

    def __init__(self, original: Any, kernel: Any) -> None:
        super().__init__()
        self.kernel = kernel
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            self.register_parameter(name, original._parameters.get(name))

    def hold(self, packed: Mapping[str, torch.Tensor]) -> None:
        """Keep the packed weights, which have the biases inside."""
        self.gate_up_proj_bias = self.down_proj_bias = None
        for name, tensor in packed.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Map [tokens, hidden_size] with chosen experts [tokens, k] and their weights to [tokens, hidden_size]."""
        out: torch.Tensor = self.kernel.apply(hidden_states.contiguous(), self._buffers, top_k_index, top_k_weights)
        return out
