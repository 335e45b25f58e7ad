"""The compiled kernels of `row_kernels`, called with tensors."""

from __future__ import annotations

import torch

from slotline.plugins.model_families.passes.row_kernels import row_kernels


class CpuKernels:
    """Implements `kernels.RowKernels` for float32 or bfloat16 on a CPU.

    Raises:
        KeyError: for other dtypes.
    """

    __slots__ = ("_rms_norm", "_rotate")

    def __init__(self, dtype: torch.dtype) -> None:
        compiled = row_kernels(dtype)
        self._rms_norm, self._rotate = compiled.rms_norm, compiled.rotate

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        """See `kernels.RowKernels.rms_norm`."""
        x = x.contiguous()
        out = torch.empty_like(x)
        n = weight.numel()
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // n, n, eps, offset)
        return out

    def rotate(self, states: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> None:
        """See `kernels.RowKernels.rotate`."""
        _, _, held, size = states.shape
        width = cos.shape[-1]
        rows, stride = cos.numel() // width, held * size
        self._rotate(states.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, stride, heads, size, rotary_size, width)
