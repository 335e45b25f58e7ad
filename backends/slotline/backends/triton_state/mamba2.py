"""Launches of the state-space dual form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from slotline.backends.triton_state.kernels import mamba2 as kernels
from slotline.backends.triton_state.rows import Rows, Tensors, given, limits, padded, precision

TILE, WARPS = 2048, 2
"""Numbers of state that a program of `decode` holds, and its warps."""
CHUNK, EXACT_CHUNK = 64, 32
"""Tokens of a chunk; products that round nothing take more registers."""
ROWS, EXACT_SCAN_TILE = 64, 2048
"""Rows of a head's state that a program of `prefill` holds; numbers of state, where products round nothing."""
FOUR_WARPS = 8192
"""Numbers of state that four warps hold; more take eight."""
MANY_STAGES, STAGES = 1, 2
"""How many chunks are on their way at a time, where programs fill the device and where they do not."""
SEGMENT = 1024
"""Tokens of a segment."""
ENOUGH = 2
"""Programs for each multiprocessor that fill the device."""
PASSED = 1024
"""Numbers of state that a program passes on from segment to segment."""


class Mamba2:
    """See `rows.Operator`."""

    def decode(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        x, z, skip = inputs["x"], given(inputs, "z", inputs["x"]), given(inputs, "D", inputs["A"])
        block = _block(facts, TILE)
        kernels.update[(triton.cdiv(facts["head_size"], block), facts["num_heads"], rows.count)](
            x,
            inputs["dt"],
            inputs["A"],
            inputs["B"],
            inputs["C"],
            skip,
            given(inputs, "dt_bias", skip),
            z,
            state["ssm"],
            out,
            rows.slots,
            rows.has_state,
            *limits(facts),
            *x.stride()[:2],
            inputs["dt"].stride(0),
            *inputs["B"].stride()[:2],
            *inputs["C"].stride()[:2],
            *z.stride()[:2],
            state["ssm"].stride(0),
            facts["num_heads"],
            facts["num_heads"] // facts["num_groups"],
            block=block,
            padded=padded(facts["state_size"]),
            has_bias="dt_bias" in inputs,
            num_warps=WARPS,
            **_sizes(facts, inputs),
            **_time(facts),
            **rows.start(),
        )

    def prefill(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        exact = inputs["x"].dtype == torch.float32
        chunk = EXACT_CHUNK if exact else CHUNK
        heads = facts["num_heads"]
        times = inputs["dt"].new_empty((2, heads, rows.num_tokens), dtype=torch.float32)
        block = _block(facts, EXACT_SCAN_TILE, 16) if exact else max(16, min(ROWS, padded(facts["head_size"])))
        _make_times(facts, inputs, times, rows, chunk)
        programs = heads * triton.cdiv(facts["head_size"], block)
        many = programs * rows.count >= ENOUGH * rows.cores
        if many or rows.num_tokens <= SEGMENT:
            stages = MANY_STAGES if many else STAGES
            between = (times, times)  # nothing goes there
            _scan(facts, inputs, state["ssm"], times, between, out, rows, chunk, block, split=False, stages=stages)
            return
        count = rows.chunks(SEGMENT)
        segments = times.new_empty((count, *state["ssm"].shape[1:]))
        between = (segments, times.new_empty((count, heads)))
        _scan(facts, inputs, state["ssm"], times, between, out, rows, chunk, block, split=True, outputs=False)
        numbers = facts["head_size"] * facts["state_size"]
        kernels.pass_states[(triton.cdiv(numbers, PASSED), heads, rows.count)](
            state["ssm"],
            *between,
            rows.starts,
            rows.slots,
            rows.has_state,
            rows.first,
            state["ssm"].stride(0),
            heads,
            numbers=numbers,
            segment=SEGMENT,
            block=PASSED,
        )
        _scan(facts, inputs, state["ssm"], times, between, out, rows, chunk, block, split=True)


def _make_times(facts: Mapping[str, Any], inputs: Tensors, times: Tensor, rows: Rows, chunk: int) -> None:
    block = min(32, padded(facts["num_heads"]))
    kernels.times[(rows.chunks(chunk), triton.cdiv(facts["num_heads"], block))](
        inputs["dt"],
        inputs["A"],
        given(inputs, "dt_bias", inputs["A"]),
        times[0],
        times[1],
        rows.starts,
        rows.slots,
        rows.first,
        rows.end,
        *limits(facts),
        inputs["dt"].stride(0),
        facts["num_heads"],
        rows.num_tokens,
        chunk=chunk,
        block=block,
        has_bias="dt_bias" in inputs,
        **_time(facts),
    )


def _scan(
    facts: Mapping[str, Any],
    inputs: Tensors,
    state: Tensor,
    times: Tensor,
    between: tuple[Tensor, Tensor],
    out: Tensor,
    rows: Rows,
    chunk: int,
    block: int,
    *,
    split: bool,
    outputs: bool = True,
    stages: int = STAGES,
) -> None:
    x, z = inputs["x"], given(inputs, "z", inputs["x"])
    large = block * padded(facts["state_size"]) > FOUR_WARPS
    blocks = triton.cdiv(facts["head_size"], block)
    kernels.scan[(blocks, facts["num_heads"], rows.chunks(SEGMENT) if split else rows.count)](
        x,
        inputs["B"],
        inputs["C"],
        given(inputs, "D", inputs["A"]),
        z,
        times[0],
        times[1],
        state,
        *between,
        out,
        rows.starts,
        rows.slots,
        rows.has_state,
        rows.first,
        rows.end,
        *x.stride()[:2],
        *inputs["B"].stride()[:2],
        *inputs["C"].stride()[:2],
        *z.stride()[:2],
        state.stride(0),
        facts["num_heads"],
        facts["num_heads"] // facts["num_groups"],
        rows.num_tokens,
        chunk=chunk,
        segment=SEGMENT,
        block=block,
        padded=padded(facts["state_size"], 16),
        split=split,
        outputs=outputs,
        precision=precision(x.dtype),
        stages=1 if large else stages,  # shared memory holds no second chunk then
        num_warps=8 if large else 4,
        **_sizes(facts, inputs),
    )


def _block(facts: Mapping[str, Any], tile: int, least: int = 1) -> int:
    """Return the rows of a head's state in a program."""
    return max(least, min(tile // padded(facts["state_size"], least), padded(facts["head_size"])))


def _sizes(facts: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
    sizes = {"head_size": facts["head_size"], "size": facts["state_size"]}
    return sizes | {"has_skip": "D" in inputs, "has_gate": "z" in inputs}


def _time(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"has_softplus": facts["dt_softplus"], "has_limit": facts.get("dt_limit") is not None}
