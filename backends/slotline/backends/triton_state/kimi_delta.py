"""Launches of Kimi Delta Attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from torch import Tensor

from slotline.backends.triton_state.kernels import kimi_delta as kernels
from slotline.backends.triton_state.rows import Rows, Tensors, padded

TILE, WARPS = 4096, 4
"""Numbers of state that a program holds, and its warps."""


class KimiDelta:
    """See `rows.Operator`. Prompts are computed token by token too."""

    def decode(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        out[: rows.count].zero_()
        _recur(facts, inputs, state, out, rows, single=True)

    def prefill(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        _recur(facts, inputs, state, out, rows, single=False)


def _recur(facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows, *, single: bool) -> None:
    q, k, v, g = (inputs[name] for name in ("q", "k", "v", "g"))
    size_k, size_v, heads = facts["head_size_k"], facts["head_size_v"], facts["num_heads"]
    block = max(1, min(TILE // padded(size_k), padded(size_v)))
    kernels.recur[(triton.cdiv(size_v, block), heads, rows.count)](
        q,
        k,
        v,
        g,
        inputs["beta"],
        state["delta"],
        out,
        rows.starts,
        rows.slots,
        rows.has_state,
        rows.first,
        float(facts["scale"]),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *g.stride()[:2],
        inputs["beta"].stride(0),
        state["delta"].stride(0),
        heads,
        size_k=size_k,
        size_v=size_v,
        padded_k=padded(size_k),
        block=block,
        single=single,
        num_warps=WARPS,
    )
