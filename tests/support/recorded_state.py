"""The reference state backend as one operation a layer, which a device without a GPU can record and run again."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.capability import GraphSupport, Level, Set
from slotline.registry.contracts import StateBatch, StateLayer
from slotline.testing.reference.state.backend import ReferenceState, Row, descriptor_of

CALLS: list[tuple[RecordedState, StateLayer, dict[str, torch.Tensor], Any]] = []


@torch.library.custom_op("slotline_tests::advance", mutates_args={"out"})
def advance(out: torch.Tensor, slots: torch.Tensor, initial: torch.Tensor, starts: torch.Tensor, number: int) -> None:
    """Run a call of `CALLS` for the rows that the tensors say now."""
    backend, layer, inputs, state = CALLS[number]
    bounds = starts.tolist()
    rows = (
        Row(i, bounds[i], bounds[i + 1], slot, begun)
        for i, (slot, begun) in enumerate(zip(slots.tolist(), initial.tolist(), strict=True))
    )
    out.copy_(backend.run(layer, inputs, state, [row for row in rows if backend.is_active(row)]))


class RecordedState(ReferenceState):
    """Reads rows from the batch's tensors when it runs, and not when it is planned."""

    def plan(self, batch: StateBatch) -> StateBatch:  # type: ignore[override]
        return batch

    def forward(self, layer: StateLayer, inputs: Any, state: Any, plan: StateBatch) -> torch.Tensor:  # type: ignore[override]
        out = self.new_output(layer, inputs)
        CALLS.append((self, layer, dict(inputs), state))
        advance(out, plan.slots, plan.has_initial_state, plan.query_start_loc, len(CALLS) - 1)
        return out

    def run(self, layer: StateLayer, inputs: Any, state: Any, rows: list[Row]) -> torch.Tensor:
        return super().forward(layer, inputs, state, rows)


descriptor = descriptor_of("recorded_state", RecordedState, devices=Set(None), graphs=Level(GraphSupport.ALWAYS))
