"""Launches of the convolution kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from slotline.backends.triton_state.kernels import convolution as kernels
from slotline.backends.triton_state.rows import Rows, Tensors, given, padded

BLOCK = 128
"""Channels of a program where each request has one token."""
WORDS, LANES, GROUP, FEW = 128, 32, 2, 64
"""Words of four channels that a program takes, where numbers have 16 bits, those of a warp, requests that share a
program's weights, and how many requests there must be for that."""
CHUNK, CHUNK_BLOCK = 16, 256
"""Tokens and channels of a program for longer ones."""


class Convolution:
    """See `rows.Operator`."""

    def decode(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        x, conv, channels = inputs["x"], state["conv"], int(facts["channels"])
        tensors = (x, inputs["weight"], given(inputs, "bias", x), conv, out)
        if in_words(facts, tensors):
            block = min(WORDS, padded(channels // 4))
            group = GROUP if rows.count >= FEW else 1
            kernels.update_words[(triton.cdiv(channels // 4, block), triton.cdiv(rows.count, group))](
                *tensors,
                rows.slots,
                rows.has_state,
                x.stride(0) // 4,
                conv.stride(0) // 4,
                channels // 4,
                rows.count,
                group=group,
                block=block,
                num_warps=max(1, block // LANES),
                **_options(facts, inputs),
                **rows.start(),
            )
            return
        block = min(BLOCK, padded(channels))
        kernels.update[(rows.count, triton.cdiv(channels, block))](
            *tensors,
            rows.slots,
            rows.has_state,
            x.stride(0),
            *conv.stride(),
            channels,
            block=block,
            **_options(facts, inputs),
            **rows.start(),
        )

    def prefill(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        x, conv, channels = inputs["x"], state["conv"], int(facts["channels"])
        block = min(CHUNK_BLOCK, padded(channels))
        kernels.convolve[(rows.chunks(CHUNK), triton.cdiv(channels, block))](
            x,
            inputs["weight"],
            given(inputs, "bias", x),
            conv,
            out,
            rows.starts,
            rows.slots,
            rows.has_state,
            rows.first,
            rows.end,
            x.stride(0),
            *conv.stride(),
            channels,
            chunk=CHUNK,
            block=block,
            **_options(facts, inputs),
        )


def in_words(facts: Mapping[str, Any], tensors: tuple[Tensor, ...]) -> bool:
    """Return True if four channels at a time can be read as whole words, from tensors (x, weight, bias, state, out)."""
    x, weight, _, conv, _ = tensors
    return (
        {tensor.dtype for tensor in tensors} in ({torch.bfloat16}, {torch.float16})
        and not any(tensor.data_ptr() % 8 for tensor in tensors)
        and not (facts["channels"] % 4 or x.stride(0) % 4 or conv.stride(0) % 4)
        and conv.stride()[1:] == (facts["width"] - 1, 1)
        and weight.is_contiguous()
    )


def _options(facts: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
    return {"width": facts["width"], "has_bias": "bias" in inputs, "has_silu": facts["activation"] == "silu"}
