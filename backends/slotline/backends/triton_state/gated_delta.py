"""Launches of the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from slotline.backends.triton_state.kernels import gated_delta as kernels
from slotline.backends.triton_state.rows import Rows, Tensors, padded, precision

TILE, WARPS = 8192, 4
"""Numbers of state that a program of `decode` holds, and its warps."""
CHUNK, LONG_CHUNK, LARGE = 32, 64, 64
"""Tokens of a chunk; those where programs do not fill the device, for heads of so many numbers on: with long chunks, a
card gave wrong values for small heads in half precision, where the interpreter's were right
(docs/decisions/state-kernels.md)."""


class Scan(NamedTuple):
    """Sizes of `prefill`: numbers of state in a program, and chunks that are loaded at a time."""

    tile: int
    stages: int


MANY, FEW, EXACT = Scan(8192, 1), Scan(4096, 3), Scan(2048, 2)
"""Where wide programs fill the device, where they do not, and for products that round nothing."""
PREPARE_WARPS = 4
"""Warps of the program that inverts a chunk's system."""


class GatedDelta:
    """See `rows.Operator`."""

    def decode(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        block = _block(facts, TILE)
        kernels.update[(triton.cdiv(facts["head_size_v"], block), facts["num_v_heads"], rows.count)](
            q,
            k,
            v,
            inputs["g"],
            inputs["beta"],
            state["delta"],
            out,
            rows.slots,
            rows.has_state,
            float(facts["scale"]),
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            inputs["g"].stride(0),
            inputs["beta"].stride(0),
            state["delta"].stride(0),
            facts["num_v_heads"],
            facts["num_v_heads"] // facts["num_k_heads"],
            padded_k=padded(facts["head_size_k"]),
            block=block,
            normed=facts["qk_l2norm"],
            num_warps=WARPS,
            **_sizes(facts),
            **rows.start(),
        )

    def prefill(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        q, k, heads = inputs["q"], inputs["k"], facts["num_v_heads"]
        exact = q.dtype == torch.float32
        shape = EXACT if exact else _shape(facts, rows)
        chunk = _chunk(facts, shape)
        sides = (facts["head_size_k"], facts["head_size_v"], chunk)
        reads, own, scores = (q.new_empty((rows.num_tokens, heads, side)) for side in sides)
        factors = q.new_empty((3, heads, rows.num_tokens), dtype=torch.float32)
        made = (reads, own, scores, factors)
        _prepare(facts, inputs, made, rows, chunk)
        block = _block(facts, shape.tile, 16)
        kernels.scan[(triton.cdiv(facts["head_size_v"], block), heads, rows.count)](
            q,
            k,
            *made,
            state["delta"],
            out,
            rows.starts,
            rows.slots,
            rows.has_state,
            rows.first,
            *q.stride()[:2],
            *k.stride()[:2],
            state["delta"].stride(0),
            heads,
            heads // facts["num_k_heads"],
            rows.num_tokens,
            factors.stride(0),
            padded_k=padded(facts["head_size_k"], 16),
            chunk=chunk,
            block=block,
            precision=precision(q.dtype),
            stages=shape.stages,
            **_sizes(facts),
        )


def _shape(facts: Mapping[str, Any], rows: Rows) -> Scan:
    """Return the sizes for prompts of this number of rows."""
    programs = triton.cdiv(facts["head_size_v"], _block(facts, MANY.tile, 16)) * facts["num_v_heads"] * rows.count
    return MANY if programs >= rows.cores else FEW


def _chunk(facts: Mapping[str, Any], shape: Scan) -> int:
    """Return the tokens of a chunk."""
    large = min(facts["head_size_k"], facts["head_size_v"]) >= LARGE
    return LONG_CHUNK if large and shape == FEW else CHUNK


def _prepare(
    facts: Mapping[str, Any], inputs: Tensors, made: tuple[Tensor, Tensor, Tensor, Tensor], rows: Rows, chunk: int
) -> None:
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    kernels.prepare[(rows.chunks(chunk), facts["num_v_heads"])](
        q,
        k,
        v,
        inputs["g"],
        inputs["beta"],
        *made,
        rows.starts,
        rows.slots,
        rows.first,
        rows.end,
        float(facts["scale"]),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        inputs["g"].stride(0),
        inputs["beta"].stride(0),
        facts["num_v_heads"],
        facts["num_v_heads"] // facts["num_k_heads"],
        rows.num_tokens,
        made[3].stride(0),
        padded_k=padded(facts["head_size_k"], 16),
        padded_v=padded(facts["head_size_v"], 16),
        chunk=chunk,
        normed=facts["qk_l2norm"],
        precision=precision(q.dtype),
        num_warps=PREPARE_WARPS,
        **_sizes(facts),
    )


def _block(facts: Mapping[str, Any], tile: int, least: int = 1) -> int:
    """Return the columns of a head's state in a program."""
    return max(least, min(tile // padded(facts["head_size_k"], least), padded(facts["head_size_v"])))


def _sizes(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"size_k": facts["head_size_k"], "size_v": facts["head_size_v"]}
