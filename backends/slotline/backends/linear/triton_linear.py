"""Products with quantized weights on a GPU: Triton's for few tokens, the vendor's library for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch.nn import functional

from slotline.backends.linear.layouts import for_each_output
from slotline.backends.linear.triton_kernels import dequantize, few_tokens, one_token, round_tokens
from slotline.registry.contracts.linear import LinearContext
from slotline.registry.contracts.weights import QuantizedWeight

FEW = 16
"""Most tokens of a product that dequantizes tile by tile. More tokens pay for the dequantized weight."""

_Configs = Sequence[triton.Config]
_ONE: _Configs = [
    triton.Config({"block_n": size, "chunks": chunks}, num_warps=warps)
    for size, chunks, warps in ((4, 32, 2), (4, 32, 4), (8, 32, 4), (16, 32, 4), (16, 32, 8), (8, 64, 4), (16, 64, 4))
]
_FEW: _Configs = [
    triton.Config({"block_n": size, "chunks": chunks}, num_warps=warps, num_stages=stages)
    for size, chunks, warps, stages in ((16, 8, 2, 4), (16, 16, 4, 4), (32, 8, 4, 3), (32, 16, 4, 3), (64, 8, 4, 4))
]


def _timed(kernel: Any, configs: _Configs, keys: list[str]) -> Any:
    """Return the kernel with the launch that is fastest on this device, timed once for each of `keys`, kept on disk."""
    return triton.autotune(configs=list(configs), key=keys, cache_results=True)(kernel)


class TritonLinear:
    """Product of one scheme and size. See `slotline.registry.contracts.linear.Linear`.

    The weight is dequantized in registers for up to `FEW` tokens, and as a whole for more, where a product of the
    vendor's library with it takes most of the time.
    """

    def __init__(self, context: LinearContext) -> None:
        self._bits = 4 if context.scheme.element.bits == 4 else 8
        self._in, self._dtype = context.in_features, getattr(torch, context.dtype)
        self._group = context.scheme.group[1] or context.in_features
        self._has_offsets = not context.scheme.symmetric
        self._tuned: set[int] = set()
        self._one = _timed(one_token, _ONE, ["num_outputs", "num_inputs", "group", "bits"])
        self._few = _timed(few_tokens, _FEW, ["num_outputs", "num_inputs", "group", "bits"])

    def pack(self, weight: QuantizedWeight) -> Mapping[str, torch.Tensor]:
        codes, rows = weight.codes, weight.scheme.group[0]
        # Scales of groups are read for each few codes. Most quantizers make them in sixteen bits.
        kept = torch.float32 if self._group == self._in else torch.float16
        packed = {
            name: for_each_output(part, rows, weight.out_features).to(kept).contiguous()
            for name, part in (("scales", weight.scales), ("offsets", weight.offsets))
            if part is not None
        }
        made = {"codes": _words(codes) if self._bits == 4 else codes.contiguous(), **packed}
        if codes.is_cuda and weight.out_features not in self._tuned:  # launches are timed now, as no capture may do it
            self._tuned.add(weight.out_features)
            for count in (1, FEW):
                x = torch.zeros(count, self._in, dtype=self._dtype, device=codes.device)
                TritonLinear.apply(self, x, made, weight.out_features)
        return made

    def apply(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        count = len(x)
        if count > FEW:
            return functional.linear(x, self._dequantized(packed, out_features))
        out = x.new_empty(count, out_features)
        codes, scales = packed["codes"], packed["scales"]
        offsets = packed.get("offsets", scales)
        if count == 1:
            self._one[lambda meta: (triton.cdiv(out_features, meta["block_n"]),)](
                x, codes, scales, offsets, out, out_features, self._in,
                group=self._group, bits=self._bits, has_offsets=self._has_offsets,
            )  # fmt: skip
        elif count:
            self._few[lambda meta: (triton.cdiv(out_features, meta["block_n"]), 1)](
                x, codes, scales, offsets, out, count, out_features, self._in,
                group=self._group, bits=self._bits, has_offsets=self._has_offsets, block_m=FEW,
            )  # fmt: skip
        return out

    def num_bytes(self, out_features: int, in_features: int) -> int:
        size = 4 if self._group == self._in else 2
        scales = out_features * (in_features // self._group) * size * (2 if self._has_offsets else 1)
        return out_features * in_features * self._bits // 8 + scales

    def _dequantized(self, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        """Return the weight [out_features, in_features] in the dtype of activations."""
        scales = packed["scales"]
        out = torch.empty(out_features, self._in, dtype=self._dtype, device=scales.device)
        dequantize[(out_features, triton.cdiv(self._in // (32 if self._bits == 4 else 16), 128))](
            packed["codes"], scales, packed.get("offsets", scales), out,
            num_inputs=self._in, group=self._group, bits=self._bits, has_offsets=self._has_offsets, chunks=128,
        )  # fmt: skip
        return out


class ScaledMmLinear(TritonLinear):
    """Product of FP8 weights with activations that are rounded to FP8, one scale for each token.

    A single token is not rounded, since reading the weight takes all the time.
    """

    def apply(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        if len(x) <= 1:
            return super().apply(x, packed, out_features)
        rounded, scales = round_to_fp8(x)
        return torch._scaled_mm(
            rounded,
            packed["codes"].T,
            scale_a=scales,
            scale_b=packed["scales"].T,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )


def round_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [n, k] in float8_e4m3fn, and their scales [n, 1] float32."""
    rounded = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    round_tokens[(len(x),)](x, rounded, scales, x.shape[1], block=1024, num_warps=4)
    return rounded, scales


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Return four-bit codes [out, in] as int32 [out, in / 32, 4]: nibble i of word w is input 4 * i + w of a chunk."""
    nibbles = (codes.to(torch.int32) + 8).view(len(codes), -1, 8, 4)
    words = torch.zeros_like(nibbles[:, :, 0])
    for i in range(8):
        words |= nibbles[:, :, i] << 4 * i
    return words
