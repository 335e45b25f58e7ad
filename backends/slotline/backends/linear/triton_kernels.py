"""Triton kernels of products with quantized weights: one token, and a few tokens.

Codes lie in chunks of 16 bytes. A chunk of eight-bit codes holds 16 inputs in order. A chunk of four-bit codes holds 32
inputs in four words, so that nibble i of word w is input ``4 * i + w``: the inputs of one nibble are adjacent, and a
word is unpacked without moving bits between threads.

Four-bit codes are unsigned. They are set into the mantissa of a float32 at bit 12 or 16, which then is 2048 or 128 plus
the code exactly: this takes a mask, and no conversion of integers, of which a multiprocessor does few at a time.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BITS_128 = tl.constexpr(0x43000000)
"""Bits of the float32 128, whose mantissa has its unit at bit 16."""
BITS_2048 = tl.constexpr(0x45000000)
"""Bits of the float32 2048, whose mantissa has its unit at bit 12."""


@triton.jit
def shifted(words, pair: tl.constexpr):
    """Return words with the nibbles ``2 * pair`` and ``2 * pair + 1`` at bits 12 and 16."""
    if pair == 0:
        moved = words << 12
    elif pair == 1:
        moved = words << 4
    elif pair == 2:
        moved = words >> 4
    else:
        moved = words >> 12
    return moved


@triton.jit
def one_token(
    x, codes, scales, offsets, out,
    num_outputs, num_inputs: tl.constexpr, group: tl.constexpr, bits: tl.constexpr, has_offsets: tl.constexpr,
    block_n: tl.constexpr, chunks: tl.constexpr,
):  # fmt: skip
    """Multiply one token [num_inputs] by a weight [num_outputs, num_inputs].

    Scales and offsets are [num_outputs, num_inputs / group].
    """
    size: tl.constexpr = 32 if bits == 4 else 16  # inputs of a chunk
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    mask_n = n < num_outputs
    total = tl.zeros([block_n, chunks], tl.float32)
    for first in range(0, num_inputs // size, chunks):
        chunk = first + tl.arange(0, chunks)
        mask_c = chunk < num_inputs // size
        both = mask_n[:, None] & mask_c[None, :]
        scaled_at = n[:, None] * (num_inputs // group) + (chunk * size // group)[None, :]
        scale = tl.load(scales + scaled_at, mask=both, other=0.0).to(tl.float32)
        if bits == 4:
            word = tl.arange(0, 4)
            at = n[:, None, None].to(tl.int64) * (num_inputs // 8) + chunk[None, :, None] * 4 + word[None, None, :]
            packed = tl.load(codes + at, mask=both[:, :, None], other=0)
            part = tl.zeros([block_n, chunks, 4], tl.float32)
            even = tl.zeros([chunks, 4], tl.float32)
            odd = tl.zeros([chunks, 4], tl.float32)
            inputs = x + chunk[:, None] * size + word[None, :]
            for pair in tl.static_range(4):
                moved = shifted(packed, pair)
                one = tl.load(inputs + pair * 8, mask=mask_c[:, None], other=0.0).to(tl.float32)
                two = tl.load(inputs + pair * 8 + 4, mask=mask_c[:, None], other=0.0).to(tl.float32)
                part += ((moved & 0x0000F000) | BITS_2048).to(tl.float32, bitcast=True) * one[None, :, :]
                part += ((moved & 0x000F0000) | BITS_128).to(tl.float32, bitcast=True) * two[None, :, :]
                even += one
                odd += two
            evens, odds = tl.sum(even, 1), tl.sum(odd, 1)
            bias = 2056.0 * evens + 136.0 * odds  # 2048 or 128 from the exponent, and 8 as codes are unsigned
            total += (tl.sum(part, 2) - bias[None, :]) * scale
            if has_offsets:
                offset = tl.load(offsets + scaled_at, mask=both, other=0.0).to(tl.float32)
                total += offset * (evens + odds)[None, :]
        else:
            place = tl.arange(0, 16)
            at = n[:, None, None].to(tl.int64) * num_inputs + (chunk[:, None] * size + place[None, :])[None, :, :]
            number = tl.load(codes + at, mask=both[:, :, None]).to(tl.float32)
            own = tl.load(x + chunk[:, None] * size + place[None, :], mask=mask_c[:, None], other=0.0).to(tl.float32)
            total += tl.where(both, tl.sum(number * own[None, :, :], 2), 0.0) * scale
            if has_offsets:
                offset = tl.load(offsets + scaled_at, mask=both, other=0.0).to(tl.float32)
                total += offset * tl.sum(own, 1)[None, :]
    tl.store(out + n, tl.sum(total, 1).to(out.dtype.element_ty), mask=mask_n)


@triton.jit
def few_tokens(
    x, codes, scales, offsets, out,
    num_tokens, num_outputs, num_inputs: tl.constexpr, group: tl.constexpr, bits: tl.constexpr,
    has_offsets: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, chunks: tl.constexpr,
):  # fmt: skip
    """Multiply tokens [num_tokens, num_inputs] by a weight [num_outputs, num_inputs].

    The weight is dequantized tile by tile in the dtype of x.
    """
    size: tl.constexpr = 32 if bits == 4 else 16
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    mask_n, mask_m = n < num_outputs, m < num_tokens
    total = tl.zeros([block_m, block_n], tl.float32)
    for first in range(0, num_inputs // size, chunks):
        if bits == 4:
            place = tl.arange(0, chunks * 4)
            chunk, word = first + place // 4, place % 4
            mask_c = chunk < num_inputs // size
            both = mask_c[:, None] & mask_n[None, :]
            scaled_at = n[None, :] * (num_inputs // group) + (chunk * size // group)[:, None]
            scale = tl.load(scales + scaled_at, mask=both, other=0.0).to(tl.float32)
            shift = -8.0 * scale
            if has_offsets:
                shift += tl.load(offsets + scaled_at, mask=both, other=0.0).to(tl.float32)
            at = n[None, :].to(tl.int64) * (num_inputs // 8) + (first * 4 + place)[:, None]
            packed = tl.load(codes + at, mask=both, other=0)
            inputs = x + m[:, None].to(tl.int64) * num_inputs + (chunk * size + word)[None, :]
            mask_x = mask_m[:, None] & mask_c[None, :]
            for pair in tl.static_range(4):
                moved = shifted(packed, pair)
                one = ((moved & 0x0000F000) | BITS_2048).to(tl.float32, bitcast=True) - 2048.0
                two = ((moved & 0x000F0000) | BITS_128).to(tl.float32, bitcast=True) - 128.0
                own = tl.load(inputs + pair * 8, mask=mask_x, other=0.0)
                total = tl.dot(own, (one * scale + shift).to(own.dtype), total)
                own = tl.load(inputs + pair * 8 + 4, mask=mask_x, other=0.0)
                total = tl.dot(own, (two * scale + shift).to(own.dtype), total)
        else:
            k = first * size + tl.arange(0, chunks * size)
            mask_k = k < num_inputs
            both = mask_k[:, None] & mask_n[None, :]
            number = tl.load(codes + n[None, :].to(tl.int64) * num_inputs + k[:, None], mask=both)
            mask_x = mask_m[:, None] & mask_k[None, :]
            own = tl.load(x + m[:, None].to(tl.int64) * num_inputs + k[None, :], mask=mask_x, other=0.0)
            if group == num_inputs and not has_offsets:
                total = tl.dot(own, tl.where(both, number.to(own.dtype), 0.0), total)
            else:
                scaled_at = n[None, :] * (num_inputs // group) + (k // group)[:, None]
                scaled = number.to(tl.float32) * tl.load(scales + scaled_at, mask=both, other=0.0).to(tl.float32)
                if has_offsets:
                    scaled += tl.load(offsets + scaled_at, mask=both, other=0.0).to(tl.float32)
                total = tl.dot(own, tl.where(both, scaled, 0.0).to(own.dtype), total)
    if bits == 8 and group == num_inputs and not has_offsets:
        total *= tl.load(scales + n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * num_outputs + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def dequantize(
    codes, scales, offsets, out,
    num_inputs: tl.constexpr, group: tl.constexpr, bits: tl.constexpr, has_offsets: tl.constexpr,
    chunks: tl.constexpr,
):  # fmt: skip
    """Write one output's weights [num_inputs] in the dtype of `out`."""
    size: tl.constexpr = 32 if bits == 4 else 16
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * chunks + tl.arange(0, chunks)
    there = chunk < num_inputs // size
    scaled_at = n * (num_inputs // group) + chunk * size // group
    scale = tl.load(scales + scaled_at, mask=there, other=0.0).to(tl.float32)
    shift = scale * (-8.0 if bits == 4 else 0.0)
    if has_offsets:
        shift += tl.load(offsets + scaled_at, mask=there, other=0.0).to(tl.float32)
    if bits == 4:
        word, nibble = tl.arange(0, 4), tl.arange(0, 8)  # a value's place is 4 * nibble + word
        at = n * (num_inputs // 8) + chunk[:, None, None] * 4 + word[None, None, :]
        packed = tl.load(codes + at, mask=there[:, None, None], other=0)
        number = ((packed >> (4 * nibble)[None, :, None]) & 15).to(tl.float32)
        k = chunk[:, None, None] * size + nibble[None, :, None] * 4 + word[None, None, :]
        value = number * scale[:, None, None] + shift[:, None, None]
        tl.store(out + n * num_inputs + k, value.to(out.dtype.element_ty), mask=there[:, None, None])
    else:
        k = chunk[:, None] * size + tl.arange(0, 16)[None, :]
        number = tl.load(codes + n * num_inputs + k, mask=there[:, None]).to(tl.float32)
        value = number * scale[:, None] + shift[:, None]
        tl.store(out + n * num_inputs + k, value.to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def round_tokens(x, codes, scales, num_inputs, block: tl.constexpr):
    """Round each token [num_inputs] to float8_e4m3fn with a scale of its own."""
    token = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([block], tl.float32)
    for first in range(0, num_inputs, block):
        k = first + tl.arange(0, block)
        own = tl.load(x + token * num_inputs + k, mask=k < num_inputs, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(own))
    scale = tl.maximum(tl.max(largest, 0) / 448.0, 1e-12)
    for first in range(0, num_inputs, block):
        k = first + tl.arange(0, block)
        own = tl.load(x + token * num_inputs + k, mask=k < num_inputs, other=0.0).to(tl.float32) / scale
        rounded = tl.clamp(own, -448.0, 448.0).to(codes.dtype.element_ty)
        tl.store(codes + token * num_inputs + k, rounded, mask=k < num_inputs)
    tl.store(scales + token, scale)
