"""Mixtures with quantized weights on a GPU: the tokens of each expert are a group of rows of one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from attrs import frozen

from slotline.backends.linear.layouts import for_each_output
from slotline.backends.linear.mixtures import activate
from slotline.backends.linear.triton_grouped import CODES, INT4, MXFP4, grouped
from slotline.registry.contracts.experts import ExpertsContext
from slotline.registry.contracts.weights import QuantizedWeight

HALF = 16
"""Four-bit codes of inputs that are this far apart share a byte."""
_BLOCKS = (16, 32, 64)
"""Rows of a block. The smallest that holds an expert's share of the tokens is taken."""
_CONFIGS: Sequence[triton.Config] = [
    triton.Config({"block_n": size, "groups": groups}, num_warps=warps, num_stages=stages)
    for size, groups, warps, stages in ((32, 2, 4, 4), (32, 4, 4, 3), (64, 2, 4, 4), (64, 4, 4, 3), (128, 2, 8, 3))
]


def _timed(kernel: Any) -> Any:
    """Return the kernel with the launch that is fastest on this device, timed once for each size, kept on disk."""
    keys = ["num_outputs", "num_inputs", "group", "kind", "block_m"]
    return triton.autotune(configs=list(_CONFIGS), key=keys, cache_results=True)(kernel)


@frozen(eq=False)
class Route:
    """Rows of a launch.

    Attributes:
        block_m: rows of a block.
        rows: [blocks * block_m] int32, the choice of each row, numbered token by token. The number of choices stands
            for none.
        experts: [blocks] int32, the expert of each block. The number of experts stands for none.
    """

    block_m: int
    rows: torch.Tensor
    experts: torch.Tensor


def route(topk_ids: torch.Tensor, num_experts: int) -> Route:
    """Return choices [tokens, k] sorted by expert, each expert's filled up to whole blocks.

    No size depends on the choices, so that the launch can be captured in a graph.
    """
    chosen = topk_ids.flatten()
    count = chosen.numel()
    share = triton.cdiv(count, num_experts)
    block = next((size for size in _BLOCKS if size >= share), _BLOCKS[-1])
    blocks = min(count, num_experts) + count // block
    order = chosen.argsort(stable=True)
    by_expert = chosen[order]
    sizes = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
    sizes.scatter_add_(0, chosen, torch.ones_like(chosen))
    filled = (sizes + block - 1) // block * block
    filled[num_experts:] = 0
    ends = filled.cumsum(0)
    place = torch.arange(count, device=chosen.device) - (sizes.cumsum(0) - sizes)[by_expert]
    row = torch.where(by_expert < num_experts, (ends - filled)[by_expert] + place, blocks * block)
    rows = torch.full((blocks * block + 1,), count, dtype=torch.int32, device=chosen.device)
    rows.scatter_(0, row, order.to(torch.int32))
    firsts = torch.arange(blocks, device=chosen.device) * block
    experts = torch.searchsorted(ends[:num_experts].contiguous(), firsts, right=True).to(torch.int32)
    return Route(block_m=block, rows=rows[:-1], experts=experts)


class TritonExperts:
    """Mixture of one scheme and size. See `slotline.registry.contracts.experts.Experts`."""

    def __init__(self, context: ExpertsContext) -> None:
        self._context = context
        self._kind = {"int4": INT4, "mxfp4": MXFP4}.get(context.scheme.name, CODES)
        self._group = context.scheme.group[1]
        self._has_offsets = not context.scheme.symmetric
        self._product = _timed(grouped)

    def pack(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> Mapping[str, torch.Tensor]:
        packed: dict[str, torch.Tensor] = {}
        for name, weight, bias in (("gate_up", gate_up, gate_up_bias), ("down", down, down_bias)):
            packed[f"{name}_codes"] = weight.codes.contiguous() if self._kind == CODES else _bytes(weight.codes)
            for key, part in (("scales", weight.scales), ("offsets", weight.offsets)):
                if part is not None:
                    every = for_each_output(part, self._context.scheme.group[0], weight.out_features)
                    packed[f"{name}_{key}"] = every.to(self._scale_dtype).contiguous()
            packed |= {} if bias is None else {f"{name}_bias": bias}
        if gate_up.codes.is_cuda:  # launches are timed now, as no capture may do it
            self._rehearse(packed)
        return packed

    def apply(
        self,
        x: torch.Tensor,
        packed: Mapping[str, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        tokens, choices = topk_ids.shape
        if not tokens:
            return torch.empty_like(x)
        context, to = self._context, route(topk_ids, self._context.experts)
        inner = x.new_zeros(tokens * choices, context.out_features)
        self._run("gate_up", x, packed, inner, to, choices)
        out = torch.zeros(tokens * choices, context.in_features, dtype=torch.float32, device=x.device)
        self._run("down", activate(inner, context).contiguous(), packed, out, to, 1)
        shares = topk_weights[..., None].float()
        total: torch.Tensor = (out.view(tokens, choices, -1) * shares).sum(1)
        return total.to(x.dtype)

    def num_bytes(self) -> int:
        context = self._context
        sizes = ((context.out_features, context.in_features), (context.in_features, context.out_features // 2))
        total = 0
        for outputs, inputs in sizes:
            groups = inputs // self._group if self._group else 1
            scales = outputs * groups * self._scale_dtype.itemsize * (2 if self._has_offsets else 1)
            total += outputs * inputs // (1 if self._kind == CODES else 2) + scales
        return context.experts * total

    @property
    def _scale_dtype(self) -> torch.dtype:
        """Scales of groups are read for each few codes. Those of MXFP4 are powers of two, exact in bfloat16."""
        if not self._group:
            return torch.float32
        return torch.bfloat16 if self._kind == MXFP4 else torch.float16

    def _rehearse(self, packed: Mapping[str, torch.Tensor]) -> None:
        """Run once with each size of block."""
        context = self._context
        for block in _BLOCKS:
            x = torch.zeros(
                block * context.experts, context.in_features, dtype=getattr(torch, context.dtype), device=context.device
            )
            ids = torch.arange(len(x), device=x.device)[:, None] % context.experts
            self.apply(x, packed, ids, torch.ones_like(ids, dtype=x.dtype))

    def _run(
        self, name: str, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out: torch.Tensor, to: Route, share: int
    ) -> None:
        """Write the products of the choices, of which `share` in a row have the same token."""
        codes, scales = packed[f"{name}_codes"], packed[f"{name}_scales"]
        offsets, bias = packed.get(f"{name}_offsets", scales), packed.get(f"{name}_bias")
        inputs, outputs = x.shape[1], out.shape[1]
        self._product[lambda meta: (triton.cdiv(outputs, meta["block_n"]), len(to.experts))](
            x, codes, scales, offsets, scales if bias is None else bias, out, to.rows, to.experts,
            len(out), share, self._context.experts, outputs,
            num_inputs=inputs, group=self._group or inputs, kind=self._kind, has_offsets=self._has_offsets,
            has_bias=bias is not None, block_m=to.block_m,
        )  # fmt: skip


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """Return four-bit codes [.., inputs] as bytes [.., inputs / 2], unsigned: input i low, input i + `HALF` high."""
    low = 8 if codes.dtype == torch.int8 else 0
    halves: torch.Tensor = (codes.to(torch.int16) + low).to(torch.uint8)
    halves = halves.unflatten(-1, (-1, 2, HALF))
    return (halves[..., 0, :] | (halves[..., 1, :] << 4)).flatten(-2)
