"""Linear plugin `vnni`: products of codes and activations of eight bits, by the CPU's dot product of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.backends.linear import vnni_kernels as kernels
from slotline.backends.linear.layouts import for_each_output, input_order
from slotline.backends.linear.workers import Workers
from slotline.registry.contracts.linear import LinearContext
from slotline.registry.contracts.weights import QuantizedWeight

KINDS = {"int4": kernels.INT4, "mxfp4": kernels.MXFP4}
"""Codes of four bits. All others have a byte."""
_LOW = {kernels.INT8: 128, kernels.INT4: 8, kernels.MXFP4: 12}
_FOR_WORKERS = (0,) * (kernels.INPUTS - kernels.ROWS - 1)
X_GROUP = 32
"""Inputs that are rounded with one scale, where the weight has one scale for each output."""
ALONE = 1 << 14
"""Up to so many inputs of all tokens are rounded by the calling thread alone."""


class VnniLinear:
    """Product of one scheme and size. See `slotline.registry.contracts.linear.Linear`.

    Inputs are rounded to eight bits, with a scale for each token and group. Inputs are permuted where the scheme has
    act order.
    """

    def __init__(self, context: LinearContext) -> None:
        self._scheme, self._inputs = context.scheme, context.in_features
        self._kind = KINDS.get(context.scheme.name, kernels.INT8)
        self._scales = context.scheme.scale_shape(1, context.in_features)[1]
        self._groups = self._scales if self._scales > 1 else context.in_features // X_GROUP
        self._narrow, self._dtype = context.dtype == "bfloat16", getattr(torch, context.dtype)
        self._width = kernels.lanes()
        self._workers = Workers()
        self._tail = torch.empty(self._workers.count, kernels.MOST, self._width)
        self._rounded = torch.empty(0, dtype=torch.int8)
        self._numbers = torch.empty(0)
        self._round = kernels.round_inputs(narrow=self._narrow)
        self._product = kernels.product(
            self._width, self._kind, offsets=not context.scheme.symmetric, narrow=self._narrow
        )

    def pack(self, weight: QuantizedWeight) -> Mapping[str, torch.Tensor]:
        rows, order = weight.out_features, input_order(weight, self._scales)
        codes = weight.codes if order is None else weight.codes[:, order]
        scales = weight.scales / 2 if self._kind == kernels.MXFP4 else weight.scales
        packed = {"codes": self._blocks(codes), "scales": self._by_blocks(scales, rows)}
        if weight.offsets is not None:
            packed["offsets"] = self._by_blocks(weight.offsets, rows)
        return packed if order is None else packed | {"order": order}

    def apply(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        if "order" in packed:
            x = x.index_select(1, packed["order"])
        tokens, dtype = x.shape[0], x.dtype
        if dtype == torch.float16:
            x = x.float()
        out = x.new_empty(tokens, out_features)
        if tokens:
            told = self._told(x, packed, out)
            self._workers.run(self._round, told, 1 if x.numel() <= ALONE else self._workers.count)
            self._workers.run(self._product, told, self._workers.count)
        return out.to(dtype)

    def rounded_groups(self) -> int:
        """See `RoundedLinear.rounded_groups`. Inputs that are permuted first have no groups."""
        return 0 if self._scheme.act_order else self._groups

    def apply_rounded(
        self, codes: torch.Tensor, scales: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int
    ) -> torch.Tensor:
        """See `RoundedLinear.apply_rounded`."""
        out = torch.empty(len(codes), out_features, dtype=torch.bfloat16 if self._narrow else torch.float32)
        if len(codes):
            sums = codes.view(len(codes), self._groups, -1).sum(2, dtype=torch.int32)  # [tokens, groups]
            starts, of_inputs = sums * -_LOW[self._kind], sums * scales
            told = self._told(codes, packed, out)
            told[[kernels.ROUNDED, kernels.STARTS, kernels.X_SCALES, kernels.X_SUMS]] = (
                codes.data_ptr(),
                starts.data_ptr(),
                scales.data_ptr(),
                of_inputs.data_ptr(),
            )
            self._workers.run(self._product, told, self._workers.count)
        return out.to(self._dtype)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        rows = -(-out_features // self._width) * self._width
        codes = rows * in_features // (1 if self._kind == kernels.INT8 else 2)
        scales = rows * self._scales * 4 * (1 if self._scheme.symmetric else 2)
        return codes + scales + (8 * in_features if self._scheme.act_order else 0)

    def _blocks(self, codes: torch.Tensor) -> torch.Tensor:
        """Return codes [rows, inputs] in the layout of `vnni_kernels`, flat."""
        low = 0 if self._kind == kernels.MXFP4 else _LOW[self._kind]
        codes = self._padded((codes.to(torch.int16) + low).to(torch.uint8))
        steps = codes.view(-1, self._width, self._inputs // 4, 4).transpose(1, 2)  # [blocks, steps, lanes, 4]
        if self._kind != kernels.INT8:
            pairs = steps.unflatten(1, (-1, 2))
            steps = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
        return steps.contiguous().flatten()

    def _by_blocks(self, scales: torch.Tensor, rows: int) -> torch.Tensor:
        """Return scales [blocks, groups, lanes], those of blocks of rows repeated for each output."""
        scales = self._padded(for_each_output(scales, self._scheme.group[0], rows))
        return scales.view(-1, self._width, self._scales).transpose(1, 2).contiguous()

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a tensor [rows, ..] with zeros after its rows, so that they fill the last block."""
        missing = -rows.shape[0] % self._width
        return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows.contiguous()

    def _told(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out: torch.Tensor) -> np.ndarray[Any, Any]:
        """Return the numbers that a kernel is told."""
        tokens, offsets = x.shape[0], packed.get("offsets")
        size = tokens * self._groups
        if self._rounded.numel() < tokens * self._inputs:
            self._rounded = self._rounded.new_empty(tokens * self._inputs)
            self._numbers = self._numbers.new_empty(3 * size)
        numbers = self._numbers.data_ptr()
        return np.array(
            (
                packed["codes"].data_ptr(),
                packed["scales"].data_ptr(),
                0 if offsets is None else offsets.data_ptr(),
                x.data_ptr(),
                out.data_ptr(),
                self._rounded.data_ptr(),
                numbers,
                numbers + 4 * size,
                numbers + 8 * size,
                self._tail.data_ptr(),
                0,
                out.shape[1],
                *_FOR_WORKERS,
                self._inputs,
                self._groups,
                tokens,
                0 if self._scales == 1 else 4 * self._width,
                _LOW[self._kind],
            ),
            np.int64,
        )
