"""Linear plugin `numba`: codes of eight and four bits, widened while they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from slotline.backends.linear import numba_kernels as kernels
from slotline.backends.linear.layouts import for_each_output, input_order
from slotline.backends.linear.workers import Workers
from slotline.registry.contracts.linear import LinearContext
from slotline.registry.contracts.weights import QuantizedWeight

KINDS = {"int8": kernels.INT8, "int6": kernels.INT8, "int4": kernels.INT4, "fp8": kernels.FP8}
FEW = 8
"""Up to so many tokens the product is ours. For more, rows are dequantized in tiles and oneDNN multiplies."""
PAIRED = 16
"""Inputs of a group that is too small for two halves of sixteen lanes."""
TILE = 1 << 20
"""Elements of a tile."""


class NumbaLinear:
    """Product of one scheme and size. See `slotline.registry.contracts.linear.Linear`.

    Scales are kept for each output and group. Inputs are permuted where the scheme has act order.
    """

    def __init__(self, context: LinearContext) -> None:
        self._scheme, self._kind = context.scheme, KINDS[context.scheme.name]
        self._inputs = context.in_features
        self._groups = context.scheme.scale_shape(1, context.in_features)[1]
        self._scales = self._groups
        if context.scheme.group[1] == PAIRED:
            self._kind = kernels.FP8_PAIRS if context.scheme.name == "fp8" else kernels.INT8_PAIRS
            self._groups //= 2
        self._size = context.in_features // self._groups
        self._dtype: torch.dtype = getattr(torch, context.dtype)
        self._workers = Workers()
        self._scratch = torch.empty(self._workers.count, self._inputs)
        self._halves = torch.tensor([[1.0], [1 / 16]])  # as `numba_kernels.one_token` wants inputs of four-bit codes
        plain = self._scales == 1 and self._kind != kernels.INT4 and self._scheme.symmetric
        self._single = kernels.one_scale if plain else kernels.one_token
        self._narrow = self._dtype == torch.bfloat16
        self._tile = torch.empty(0, dtype=self._dtype if self._narrow else torch.float32)

    def pack(self, weight: QuantizedWeight) -> Mapping[str, torch.Tensor]:
        rows, order = weight.out_features, input_order(weight, self._scales)
        scales = self._by_rows(weight.scales, rows)
        codes = weight.codes if order is None else weight.codes[:, order]
        codes = codes.contiguous().view(torch.uint8)
        if self._kind == kernels.INT4:
            halves = ((codes + 8) & 15).view(rows, self._groups, 2, self._size // 2)
            codes = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
        packed = {"codes": codes.contiguous(), "scales": scales}
        if weight.offsets is not None:
            packed["offsets"] = self._by_rows(weight.offsets, rows)
        return packed if order is None else packed | {"order": order}

    def apply(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        if "order" in packed:
            x = x.index_select(1, packed["order"])
        tokens = x.shape[0]
        if tokens > FEW or tokens == 0:
            return self._many(x, packed, out_features)
        if tokens == 1 and self._kind == kernels.INT4:
            inputs = x.view(self._groups, 2, -1) * self._halves
        else:
            inputs = x if x.dtype == torch.float32 else x.float()
        out = torch.empty(tokens, out_features)
        told = self._told(packed, out, out_features, inputs, tokens)
        self._run(self._single if tokens == 1 else kernels.few_tokens, told)
        return out if x.dtype == torch.float32 else out.to(x.dtype)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        codes = out_features * in_features // (2 if self._kind == kernels.INT4 else 1)
        scales = out_features * self._scales * 4 * (1 if self._scheme.symmetric else 2)
        return codes + scales + (8 * in_features if self._scheme.act_order else 0)

    def _many(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        out = x.new_empty(x.shape[0], out_features)
        rows = max(1, min(out_features, TILE // self._inputs))
        if self._tile.numel() < rows * self._inputs:
            self._tile = self._tile.new_empty(rows * self._inputs)
        for first in range(0, out_features, rows):
            count = min(rows, out_features - first)
            tile = self._tile[: count * self._inputs].view(count, self._inputs)
            told = self._told(packed, tile, count, tile, 0)
            told[kernels.FIRST] = first
            self._run(kernels.narrow_tile if self._narrow else kernels.tile, told)
            out[:, first : first + count] = functional.linear(x, tile.to(x.dtype))
        return out

    def _told(
        self,
        packed: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        rows: int,
        x: torch.Tensor,
        tokens: int,
    ) -> np.ndarray[Any, Any]:
        """Return the numbers that a kernel is told."""
        offsets = packed.get("offsets")
        return np.array(
            (
                packed["codes"].data_ptr(),
                packed["scales"].data_ptr(),
                0 if offsets is None else offsets.data_ptr(),
                x.data_ptr(),
                out.data_ptr(),
                self._scratch.data_ptr(),
                rows,
                self._inputs,
                self._groups,
                tokens,
                *[0] * (kernels.PLACES - kernels.THREADS),
            ),
            np.int64,
        )

    def _run(self, kernel: Any, told: np.ndarray[Any, Any]) -> None:
        self._workers.run(kernel(self._kind), told, self._workers.count)

    def _by_rows(self, scales: torch.Tensor, rows: int) -> torch.Tensor:
        """Return scales [rows, groups], those of blocks repeated for each output."""
        return for_each_output(scales, self._scheme.group[0], rows).contiguous()
