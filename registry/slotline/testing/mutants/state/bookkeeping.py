"""Bugs in slots, rows and padding."""

from __future__ import annotations

import torch
from attrs import evolve
from torch import Tensor

from slotline.registry.contracts.state import StateBatch, StateContext, StateLayer
from slotline.testing.check import Level
from slotline.testing.mutants.state.common import mutant
from slotline.testing.reference.state import ReferenceState
from slotline.testing.reference.state.backend import Row
from slotline.testing.reference.state.recurrences import State, Tensors


class NotReset(ReferenceState):
    """A request without an initial state starts from what its slot holds."""

    def initial(self, layer: StateLayer, state: Tensors, row: Row) -> State:
        return super().initial(layer, state, evolve(row, has_initial_state=True))


class SingleTokenNotReset(ReferenceState):
    """A row of one token is taken for a decode: it starts from what its slot holds, first token or not."""

    def initial(self, layer: StateLayer, state: Tensors, row: Row) -> State:
        known = row.has_initial_state or row.num_tokens == 1
        return super().initial(layer, state, evolve(row, has_initial_state=known))


class ResetByFirstRow(ReferenceState):
    """The initial state of all rows is decided by the batch's first row."""

    def plan(self, batch: StateBatch) -> list[Row]:
        rows = super().plan(batch)
        return [evolve(row, has_initial_state=rows[0].has_initial_state) for row in rows]


class FirstSlot(ReferenceState):
    """All rows use the slot of the first."""

    def plan(self, batch: StateBatch) -> list[Row]:
        rows = super().plan(batch)
        return [evolve(row, slot=rows[0].slot) for row in rows]


class SlotsByPosition(ReferenceState):
    """Row i uses slot i."""

    def plan(self, batch: StateBatch) -> list[Row]:
        return [evolve(row, slot=row.position) for row in super().plan(batch)]


class PaddingWritesLast(ReferenceState):
    """Slot -1 is not skipped, and so is the last one."""

    def is_active(self, row: Row) -> bool:
        return row.num_tokens > 0


class PaddingWritesFirst(ReferenceState):
    """Slot -1 is clamped to 0."""

    def plan(self, batch: StateBatch) -> list[Row]:
        return super().plan(evolve(batch, slots=batch.slots.clamp(min=0)))


class StopsAtPadding(ReferenceState):
    """Rows after the first padding row are skipped."""

    def plan(self, batch: StateBatch) -> list[Row]:
        padding = (batch.slots < 0).nonzero().flatten().tolist()
        return [row for row in super().plan(batch) if not padding or row.position < padding[0]]


class PaddingUnwritten(ReferenceState):
    """Outputs of padding are whatever the memory held."""

    def new_output(self, layer: StateLayer, inputs: Tensors) -> Tensor:
        return torch.empty_like(inputs["v" if layer.state_kind == "gated_delta" else "x"])


class EmptyRowResets(ReferenceState):
    """A row without tokens sets its slot to zeros."""

    def is_active(self, row: Row) -> bool:
        return row.slot >= 0

    def advance(self, layer: StateLayer, inputs: Tensors, before: State, row: Row) -> tuple[Tensor, State]:
        if row.num_tokens:
            return super().advance(layer, inputs, before, row)
        return inputs["x"], {name: torch.zeros_like(value) for name, value in before.items()}


class LeaksToNextRow(ReferenceState):
    """A request without an initial state starts from the end of the row before it."""

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        self.end: State | None = None

    def initial(self, layer: StateLayer, state: Tensors, row: Row) -> State:
        if row.has_initial_state or row.position == 0 or self.end is None:
            return super().initial(layer, state, row)
        return self.end

    def advance(self, layer: StateLayer, inputs: Tensors, before: State, row: Row) -> tuple[Tensor, State]:
        output, self.end = super().advance(layer, inputs, before, row)
        return output, self.end


class NarrowSlots(ReferenceState):
    """Slot numbers are kept in one byte."""

    def plan(self, batch: StateBatch) -> list[Row]:
        return super().plan(evolve(batch, slots=batch.slots.to(torch.int8)))


class StalePlan(ReferenceState):
    """A plan is reused for the next batch with the same query lengths."""

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        self.plans: dict[tuple[object, ...], list[Row]] = {}

    def key(self, batch: StateBatch) -> tuple[object, ...]:
        return (tuple(batch.query_start_loc_cpu.tolist()), bool(batch.has_initial_state.all()))

    def plan(self, batch: StateBatch) -> list[Row]:
        key = self.key(batch)
        if key not in self.plans:
            self.plans[key] = super().plan(batch)
        return self.plans[key]


class StalePlanOfSlots(StalePlan):
    """A plan is reused for the next batch with the same query lengths in the same slots, whoever owns them by then."""

    def key(self, batch: StateBatch) -> tuple[object, ...]:
        return (tuple(batch.query_start_loc_cpu.tolist()), tuple(batch.slots.tolist()))


class ContiguousState(ReferenceState):
    """The state is taken for contiguous: in a page, a copy is updated."""

    def store(self, state: Tensors, slot: int, new: Tensors) -> None:
        super().store({name: value.contiguous() for name, value in state.items()}, slot, new)


class RowMajorConv(ReferenceState):
    """A channel-last convolution state is written as if it were row-major."""

    def store(self, state: Tensors, slot: int, new: Tensors) -> None:
        slots = {name: value[slot] for name, value in state.items()}
        dense = {
            name: value.as_strided(value.shape, (value.shape[1], 1), value.storage_offset())
            for name, value in slots.items()
        }
        super().store({name: value[None] for name, value in dense.items()}, 0, new)


class ContiguousInputs(ReferenceState):
    """Inputs are taken for contiguous."""

    def inputs_of(self, layer: StateLayer, inputs: Tensors, row: Row) -> dict[str, Tensor]:
        dense = {}
        for name, value in inputs.items():
            strides = torch.empty(value.shape, device="meta").stride()
            dense[name] = value.as_strided(value.shape, strides, value.storage_offset())
        return super().inputs_of(layer, dense, row)


class SpillsOver(ReferenceState):
    """Storing a state spills over its end, into the next slot or what lies behind it in the page."""

    def store(self, state: Tensors, slot: int, new: Tensors) -> None:
        super().store(state, slot, new)
        for value in state.values():
            behind = value[slot].storage_offset() + value[slot].numel()
            if behind < value.untyped_storage().nbytes() // value.itemsize:
                value.as_strided((1,), (1,), behind).zero_()


class ThirdNotReset(ReferenceState):
    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        self.starts: dict[tuple[str, int], int] = {}

    def initial(self, layer: StateLayer, state: Tensors, row: Row) -> State:
        if not row.has_initial_state:
            key = layer.name, row.slot
            self.starts[key] = self.starts.get(key, 0) + 1
            if self.starts[key] == 3:
                return {name: value[row.slot].float() for name, value in state.items()}
        return super().initial(layer, state, row)


MUTANTS = (
    mutant("reset-by-first-row", ResetByFirstRow, Level.NUMERICS, "mamba2"),
    mutant("slot-of-first-row", FirstSlot, Level.NUMERICS, "mamba1"),
    mutant("leaks-to-next-row", LeaksToNextRow, Level.NUMERICS, "mamba2"),
    mutant("conv-leaks-to-next-row", LeaksToNextRow, Level.NUMERICS, "short_conv"),
    mutant("slots-by-position", SlotsByPosition, Level.NUMERICS, "mamba2"),
    mutant("state-not-reset", NotReset, Level.HOSTILE, "mamba2"),
    mutant("conv-state-not-reset", NotReset, Level.HOSTILE, "short_conv"),
    mutant("single-token-not-reset", SingleTokenNotReset, Level.HOSTILE, "gated_delta"),
    mutant("third-not-reset", ThirdNotReset, Level.HOSTILE, "mamba2"),
    mutant("padding-writes-last-slot", PaddingWritesLast, Level.HOSTILE, "mamba1"),
    mutant("padding-writes-first-slot", PaddingWritesFirst, Level.HOSTILE, "short_conv"),
    mutant("stops-at-padding", StopsAtPadding, Level.HOSTILE, "gated_delta"),
    mutant("padding-unwritten", PaddingUnwritten, Level.HOSTILE, "mamba2"),
    mutant("empty-row-resets", EmptyRowResets, Level.HOSTILE, "mamba2"),
    mutant("slots-in-a-byte", NarrowSlots, Level.HOSTILE, "short_conv"),
    mutant("stale-plan", StalePlan, Level.HOSTILE, "mamba2"),
    mutant("stale-plan-of-slots", StalePlanOfSlots, Level.HOSTILE, "mamba1"),
    mutant("state-taken-for-contiguous", ContiguousState, Level.HOSTILE, "mamba2"),
    mutant("conv-taken-for-row-major", RowMajorConv, Level.HOSTILE, "short_conv"),
    mutant("inputs-taken-for-contiguous", ContiguousInputs, Level.HOSTILE, "mamba1"),
    mutant("spills-over", SpillsOver, Level.NUMERICS, "gated_delta"),
)
