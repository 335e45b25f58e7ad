"""Triton kernel of products with the quantized weights of several experts."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

CODES, INT4, MXFP4 = range(3)
"""Kinds of weights: codes of eight bits, and two kinds of four bits. See `triton_experts` for their layout."""
_CODES, _INT4 = tl.constexpr(CODES), tl.constexpr(INT4)
_E2M1_UNIT = tl.constexpr(16384.0)
"""What the bits of an E2M1 number, set into a float16 behind its sign, must be multiplied by."""


@triton.jit
def _number(nibble, kind: tl.constexpr):
    """Return the numbers of four-bit codes in float32."""
    if kind == _INT4:
        number = nibble.to(tl.float32) - 8.0
    else:
        wide = nibble.to(tl.int16)
        bits = ((wide & 7) << 9) | ((wide & 8) << 12)
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * _E2M1_UNIT
    return number


@triton.jit
def grouped(
    x, codes, scales, offsets, bias, out, rows, experts,
    num_rows, share, num_experts, num_outputs,
    num_inputs: tl.constexpr, group: tl.constexpr, kind: tl.constexpr, has_offsets: tl.constexpr,
    has_bias: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, groups: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x by their expert's weight [num_outputs, num_inputs], dequantized tile by tile.

    Row r of `out` [num_rows, num_outputs] has the inputs of row ``r // share`` of x. Block b of `rows` belongs to
    ``experts[b]``. Scales and offsets are [experts, num_outputs, num_inputs / group].
    """
    expert = tl.load(experts + tl.program_id(1)).to(tl.int64)
    if expert < num_experts:
        n = tl.program_id(0) * block_n + tl.arange(0, block_n)
        row = tl.load(rows + tl.program_id(1) * block_m + tl.arange(0, block_m)).to(tl.int64)
        mask_n, mask_m = n < num_outputs, row < num_rows
        inputs = x + (row // share)[:, None] * num_inputs
        outputs = expert * num_outputs + n
        total = tl.zeros([block_m, block_n], tl.float32)
        for first in range(0, num_inputs, groups * 32):
            place = tl.arange(0, groups * 16)
            k = first + place // 16 * 32 + place % 16
            for half in tl.static_range(2):
                own_k = k + half * 16
                mask_k = own_k < num_inputs
                both = mask_k[:, None] & mask_n[None, :]
                if kind == _CODES:
                    at = outputs[None, :] * num_inputs + own_k[:, None]
                    number = tl.load(codes + at, mask=both).to(tl.float32)
                else:
                    at = outputs[None, :] * (num_inputs // 2) + (first // 2 + place)[:, None]
                    packed = tl.load(codes + at, mask=both, other=0)
                    number = _number((packed >> 4) if half == 1 else (packed & 15), kind)
                scaled_at = outputs[None, :] * (num_inputs // group) + (own_k // group)[:, None]
                value = number * tl.load(scales + scaled_at, mask=both, other=0.0).to(tl.float32)
                if has_offsets:
                    value += tl.load(offsets + scaled_at, mask=both, other=0.0).to(tl.float32)
                own = tl.load(inputs + own_k[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0)
                total = tl.dot(own, tl.where(both, value, 0.0).to(own.dtype), total)
        if has_bias:
            total += tl.load(bias + outputs, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        at = row[:, None] * num_outputs + n[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])
