"""The `triton` state backend: which kernel serves which rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from slotline.backends.triton_state.convolution import Convolution
from slotline.backends.triton_state.gated_delta import GatedDelta
from slotline.backends.triton_state.kimi_delta import KimiDelta
from slotline.backends.triton_state.mamba1 import Mamba1
from slotline.backends.triton_state.mamba2 import Mamba2
from slotline.backends.triton_state.order import Order
from slotline.backends.triton_state.rows import Operator, Rows, Tensors, clear_padding
from slotline.backends.triton_state.trails import DELTA_RULES, Trails
from slotline.kernels.graph_capture_state import is_replayed
from slotline.registry import kimi_delta
from slotline.registry.contracts.state import StateBatch, StateContext, StateLayer

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "short_conv": Convolution(),
        "mamba1": Mamba1(),
        "mamba2": Mamba2(),
        "gated_delta": GatedDelta(),
        kimi_delta.NAME: KimiDelta(),
    }
)

EARLIEST = (9, 0)
"""The compute capability from which a kernel may start before the one in front of it ends."""


class TritonState:
    """State backend in Triton. It keeps nothing between steps except the data for rollback of drafts.

    Slots, lengths and initial states are read on the device. Only counts of rows and tokens come from the host. In a
    captured forward these are the sizes of its tensors, so that a replay may have any requests that fit into them.
    """

    def __init__(self, context: StateContext) -> None:
        on_gpu = torch.device(context.device).type == "cuda"
        self._cores = torch.cuda.get_device_properties(context.device).multi_processor_count if on_gpu else 1
        self._trails = Trails(context, self._cores) if context.max_draft_tokens else None
        self._order = Order()
        self._early = on_gpu and torch.cuda.get_device_capability(context.device) >= EARLIEST

    def plan(self, batch: StateBatch) -> StateBatch:
        """Return the batch itself. Its tensors keep their addresses from one replay to the next."""
        self._order.begin()
        if self._trails is not None:
            self._trails.begin(batch)
        return batch

    def forward(self, layer: StateLayer, inputs: Tensors, state: Tensors, plan: StateBatch) -> Tensor:
        """See the contract."""
        like = inputs["v" if layer.state_kind in DELTA_RULES else "x"]
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        tokens, operator = out.shape[0], OPERATORS[layer.state_kind]
        single, captured = plan.num_decodes == plan.num_requests, is_replayed()
        if not tokens:
            return out
        if self._trails is not None and not single:
            self._trails.keep(layer, inputs, state, plan, captured=captured)
        decodes = min(plan.slots.shape[0], tokens) if single else 0 if captured else plan.num_decodes
        if decodes:
            ahead = self._order.launch(next(iter(state.values())))
            operator.decode(layer.facts, inputs, state, out, self._rows(plan, 0, decodes, tokens, ahead=ahead))
        if single:
            out[decodes:].zero_()
            return out
        rows = self._rows(plan, decodes, plan.slots.shape[0], tokens)
        clear_padding(out, rows)
        operator.prefill(layer.facts, inputs, state, out, rows)
        self._order.begin()
        return out

    def _rows(self, batch: StateBatch, first: int, end: int, tokens: int, *, ahead: bool = False) -> Rows:
        return Rows(
            starts=batch.query_start_loc,
            slots=batch.slots,
            has_state=batch.has_initial_state.view(torch.int8),
            first=first,
            end=end,
            num_tokens=tokens,
            cores=self._cores,
            early=self._early,
            ahead=ahead,
        )

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        """See the contract: the states before the step again, and from them the accepted tokens once more."""
        self._order.begin()
        if self._trails is not None:
            self._trails.go_back(layer, OPERATORS[layer.state_kind], state, slots, accepted)

    def copy(self, layer: StateLayer, state: Tensors, source: int, target: int) -> None:
        """See the contract."""
        self._order.begin()
        for tensor in state.values():
            tensor[target].copy_(tensor[source])
