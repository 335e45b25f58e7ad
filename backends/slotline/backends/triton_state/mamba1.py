"""Launches of the selective scan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from slotline.backends.triton_state.kernels import mamba1 as kernels
from slotline.backends.triton_state.rows import Rows, Tensors, given, limits, padded

TILE, WARPS, FEW_WARPS = 1024, 2, 4
"""Numbers of state that a program of `decode` holds, its warps, and those where programs are few."""
FEW = 16
"""Programs of `decode` for each multiprocessor that run at a time; more of them do better without reading ahead."""
SCAN_TILE, GROUP, SEGMENT_GROUP = 512, 3, 2
"""Numbers of state that a program of `prefill`, one warp, holds, and tokens whose inputs it fetches together: of whole
requests, and of segments."""
SEGMENT, LONG_SEGMENT, LONG = 128, 256, 4096
"""Tokens of a segment; those where a step has more tokens than so many."""
ENOUGH = 16
"""Programs of `prefill` for each multiprocessor that fill the device without segments."""
PASSED = 1024
"""Numbers of state that a program passes on from segment to segment."""


class Mamba1:
    """See `rows.Operator`."""

    def decode(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        channels = int(facts["channels"])
        block = _block(facts, TILE)
        tensors, strides = _tensors(inputs)
        programs = triton.cdiv(channels, block) * rows.count
        few = programs <= FEW * rows.cores
        kernels.update[(rows.count, triton.cdiv(channels, block))](
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
            full=not few and channels % block == 0 and facts["state_size"] == padded(facts["state_size"]),
            num_warps=FEW_WARPS if few else WARPS,
            **_options(facts, inputs),
            **rows.start(programs, FEW),
        )

    def prefill(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        channels, size = int(facts["channels"]), int(facts["state_size"])
        block = _block(facts, SCAN_TILE)
        if triton.cdiv(channels, block) * rows.count >= ENOUGH * rows.cores or rows.num_tokens <= SEGMENT:
            between = (state["ssm"], state["ssm"])  # nothing goes there
            _scan(facts, inputs, state["ssm"], between, out, rows)
            return
        segment = SEGMENT if rows.num_tokens <= LONG else LONG_SEGMENT
        count = rows.chunks(segment)
        segments = out.new_empty((count, channels, size), dtype=torch.float32)
        between = (segments, segments.new_empty((count, channels)))
        _scan(facts, inputs, state["ssm"], between, out, rows, segment, outputs=False)
        block = _block(facts, PASSED)
        kernels.pass_states[(triton.cdiv(channels, block), rows.count)](
            inputs["A"],
            state["ssm"],
            *between,
            rows.starts,
            rows.slots,
            rows.has_state,
            rows.first,
            state["ssm"].stride(0),
            channels,
            size=size,
            padded=padded(size),
            segment=segment,
            block=block,
        )
        _scan(facts, inputs, state["ssm"], between, out, rows, segment)


def _scan(
    facts: Mapping[str, Any],
    inputs: Tensors,
    state: Tensor,
    between: tuple[Tensor, Tensor],
    out: Tensor,
    rows: Rows,
    segment: int = 0,
    *,
    outputs: bool = True,
) -> None:
    """Scan whole requests, or segments of the given number of tokens."""
    channels = int(facts["channels"])
    block = _block(facts, SCAN_TILE)
    tensors, strides = _tensors(inputs)
    kernels.scan[(triton.cdiv(channels, block), rows.chunks(segment) if segment else rows.count)](
        *tensors,
        state,
        *between,
        out,
        rows.starts,
        rows.slots,
        rows.has_state,
        rows.first,
        rows.end,
        *limits(facts),
        *strides,
        state.stride(0),
        channels,
        block=block,
        group=SEGMENT_GROUP if segment else GROUP,
        segment=segment,
        split=segment > 0,
        outputs=outputs,
        num_warps=1,
        **_options(facts, inputs),
    )


def _block(facts: Mapping[str, Any], tile: int) -> int:
    """Return the channels of a program."""
    return min(max(1, tile // padded(facts["state_size"])), padded(facts["channels"]))


def _tensors(inputs: Tensors) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the kernels' inputs, and the strides of those with tokens."""
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
