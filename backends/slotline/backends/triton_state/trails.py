"""Rollback to an accepted draft: the data that the layers keep of the requests that a step verifies.

The state before a request's tokens is kept, and the operands of the recurrence for its tokens. To go back, the state is
restored and the accepted tokens are computed again by the kernel for prompts. All data is in buffers for the most
requests and drafts, so that captured forwards fill them like eager ones. The buffers of the states are created with the
backend, so that they are counted when memory is measured. The buffers of tokens are small and created by the first
forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

import numpy as np
import torch
import triton
from attrs import frozen
from torch import Tensor

from slotline.backends.triton_state.kernels import trails as kernels
from slotline.backends.triton_state.rows import Operator, Rows, Tensors
from slotline.registry import kimi_delta
from slotline.registry.contracts.state import StateBatch, StateContext, StateLayer

BLOCK = 1024
"""Numbers that a program copies."""
DELTA_RULES = ("gated_delta", kimi_delta.NAME)
"""Kinds whose output has the shape of `v`."""
KEPT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "short_conv": {"x": "x"},
        "mamba1": {"x": "x", "dt": "dt", "B": "B", "C": "B"},
        "mamba2": {"x": "x", "dt": "dt", "B": "B", "C": "B"},
        **{kind: {"k": "k", "v": "v", "g": "g", "beta": "beta", "q": "k"} for kind in DELTA_RULES},
    }
)
"""By kind, the inputs that a state hangs on, and what stands in for those that the output alone hangs on."""
MADE = ("A", "dt_bias")
"""Parameters that a model makes anew in each forward, so that a graph may use their memory for something else."""


@frozen(kw_only=True, eq=False)
class Trail:
    """The buffers of one layer.

    Attributes:
        before: [requests, size], states as they lie in their slots.
        tokens: by input, [requests * (1 + drafts), ...].
        made: copies of the parameters `MADE`.
        parameters: the others.
    """

    before: Tensor
    tokens: Tensors
    made: Tensors
    parameters: Tensors


class Trails:
    """Data kept for `commit`, layer by layer."""

    def __init__(self, context: StateContext, cores: int) -> None:
        self.most = 1 + context.max_draft_tokens
        self._rows, self._cores = context.max_requests, cores
        self._before = {layer.index: _room(layer, context) for layer in context.layers}
        self._trails: dict[int, Trail] = {}
        self._starts: Tensor | None = None
        self._verifies = False
        self._again: tuple[Tensor, Tensor, Tensor] | None = None

    def begin(self, batch: StateBatch) -> None:
        """Begin a step."""
        self._starts = batch.query_start_loc
        lens = np.diff(batch.query_start_loc_cpu[: batch.num_requests + 1])
        self._verifies = bool(((lens > 1) & (lens <= self.most)).any())

    def keep(self, layer: StateLayer, inputs: Tensors, state: Tensors, batch: StateBatch, *, captured: bool) -> None:
        """Keep the data of the requests that the step, or each replay, verifies, before the layer's states change."""
        (tensor,) = state.values()
        trail = self._trails.get(layer.index)
        if trail is None:
            trail = self._trails[layer.index] = self._made(layer, inputs)
        if not (captured or self._verifies):
            return
        for name, value in trail.made.items():
            value.copy_(inputs[name])
        rows, (starts, slots) = min(batch.slots.shape[0], self._rows), (batch.query_start_loc, batch.slots)
        size = trail.before.shape[1]
        kernels.keep_state[(rows, triton.cdiv(size, BLOCK))](
            tensor,
            trail.before,
            starts,
            slots,
            batch.has_initial_state.view(torch.int8),
            self.most,
            tensor.stride(0),
            size,
            block=BLOCK,
        )
        for name, kept in trail.tokens.items():
            value, size = inputs[name], kept[0].numel()
            kernels.keep_tokens[(rows * self.most, triton.cdiv(size, BLOCK))](
                value,
                kept,
                starts,
                slots,
                self.most,
                value.stride(0),
                value.stride(-2) if value.ndim > 2 else 0,
                size,
                value.shape[-1],
                block=BLOCK,
            )

    def go_back(self, layer: StateLayer, operator: Operator, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        """Make the states those after `accepted` tokens, [num_requests] of the last batch as `slots` are."""
        trail, rows = self._trails.get(layer.index), min(slots.shape[0], self._rows)
        if trail is None or self._starts is None or not rows:
            return
        (tensor,) = state.values()
        again_starts, again_slots, has_state = self._buffers(slots.device)
        size = trail.before.shape[1]
        kernels.go_back[(rows, triton.cdiv(size, BLOCK))](
            tensor,
            trail.before,
            self._starts,
            slots,
            accepted,
            again_starts,
            again_slots,
            self.most,
            tensor.stride(0),
            size,
            block=BLOCK,
        )
        count = rows * self.most
        inputs = {name: trail.tokens[kept][:count] for name, kept in KEPT[layer.state_kind].items()}
        out = torch.empty_like(inputs["v" if layer.state_kind in DELTA_RULES else "x"])  # never read
        again = Rows(
            starts=again_starts,
            slots=again_slots,
            has_state=has_state,
            first=0,
            end=2 * rows,
            num_tokens=count,
            cores=self._cores,
        )
        operator.prefill(layer.facts, {**trail.parameters, **trail.made, **inputs}, state, out, again)

    def _made(self, layer: StateLayer, inputs: Tensors) -> Trail:
        tokens = {name: inputs[name] for name in dict.fromkeys(KEPT[layer.state_kind].values())}
        return Trail(
            before=self._before[layer.index],
            tokens={name: t.new_empty((self._rows * self.most, *t.shape[1:])) for name, t in tokens.items()},
            made={name: torch.empty_like(inputs[name]) for name in MADE if name in inputs},
            parameters={name: inputs[name] for name in ("weight", "bias") if name in inputs},
        )

    def _buffers(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return the buffers for the batch that `go_back` runs again: starts, slots, and that all have states."""
        if self._again is None:
            count = 2 * self._rows
            starts = torch.empty(count + 1, dtype=torch.int32, device=device)
            slots = torch.empty(count, dtype=torch.int32, device=device)
            self._again = (starts, slots, torch.ones(count, dtype=torch.int8, device=device))
        return self._again


def _room(layer: StateLayer, context: StateContext) -> Tensor:
    """Allocate buffers for the layer's states of all requests: [max_requests, size]."""
    (spec,) = layer.tensors
    return torch.empty(
        (context.max_requests, prod(spec.shape)), dtype=getattr(torch, spec.dtype), device=context.device
    )
