"""Launches of the selective scan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from torch import Tensor

from slotline.backends.triton_state.kernels import mamba1 as kernels
from slotline.backends.triton_state.rows import Rows, Tensors, given, limits, padded

TILE, WARPS = 2048, 4
"""Numbers of state that a program of `decode` holds, and its warps."""
SCAN_TILE, GROUP = 512, 4
"""Numbers of state that a program of `prefill`, one warp, holds, and tokens whose inputs it fetches together."""


class Mamba1:
    """See `rows.Operator`."""

    def decode(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        channels = int(facts["channels"])
        block = _block(facts, TILE)
        tensors, strides = _tensors(inputs)
        kernels.update[(triton.cdiv(channels, block), rows.count)](
            *tensors,
            state["ssm"],
            out,
            rows.slots,
            rows.has_state,
            *limits(facts),
            *strides,
            state["ssm"].stride(0),
            channels,
            block=block,
            num_warps=WARPS,
            **_options(facts, inputs),
        )

    def prefill(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        channels = int(facts["channels"])
        block = _block(facts, SCAN_TILE)
        tensors, strides = _tensors(inputs)
        kernels.scan[(triton.cdiv(channels, block), rows.count)](
            *tensors,
            state["ssm"],
            out,
            rows.starts,
            rows.slots,
            rows.has_state,
            rows.first,
            *limits(facts),
            *strides,
            state["ssm"].stride(0),
            channels,
            block=block,
            group=GROUP,
            num_warps=1,
            **_options(facts, inputs),
        )


def _block(facts: Mapping[str, Any], tile: int) -> int:
    """Channels of a program."""
    return min(max(1, tile // padded(facts["state_size"])), padded(facts["channels"]))


def _tensors(inputs: Tensors) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The kernels' inputs, and the strides of those that have tokens."""
    x = inputs["x"]
    parameters = (given(inputs, "D", inputs["A"]), given(inputs, "dt_bias", inputs["A"]))
    z = given(inputs, "z", x)
    tensors = (x, inputs["dt"], inputs["A"], inputs["B"], inputs["C"], *parameters, z)
    return tensors, tuple(tensor.stride(0) for tensor in (x, inputs["dt"], inputs["B"], inputs["C"], z))


def _options(facts: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
    return {
        "size": facts["state_size"],
        "padded": padded(facts["state_size"]),
        "has_skip": "D" in inputs,
        "has_bias": "dt_bias" in inputs,
        "has_gate": "z" in inputs,
        "has_softplus": facts["dt_softplus"],
        "has_limit": facts.get("dt_limit") is not None,
    }
