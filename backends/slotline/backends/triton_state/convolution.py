"""Launches of the convolution kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from torch import Tensor

from slotline.backends.triton_state.kernels import convolution as kernels
from slotline.backends.triton_state.rows import Rows, Tensors, given, padded

BLOCK = 128
"""Channels of a program where each request has one token."""
CHUNK, CHUNK_BLOCK = 16, 256
"""Tokens and channels of a program for longer ones."""


class Convolution:
    """See `rows.Operator`."""

    def decode(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        x, conv, channels = inputs["x"], state["conv"], int(facts["channels"])
        block = min(BLOCK, padded(channels))
        kernels.update[(rows.count, triton.cdiv(channels, block))](
            x,
            inputs["weight"],
            given(inputs, "bias", x),
            conv,
            out,
            rows.slots,
            rows.has_state,
            x.stride(0),
            *conv.stride(),
            channels,
            block=block,
            **_options(facts, inputs),
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


def _options(facts: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
    return {"width": facts["width"], "has_bias": "bias" in inputs, "has_silu": facts["activation"] == "silu"}
