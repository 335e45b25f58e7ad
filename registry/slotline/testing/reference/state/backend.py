"""State backend in plain torch: requests one by one, tokens one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from attrs import frozen
from torch import Tensor

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.state import (
    STATE_KINDS,
    StateBackend,
    StateBatch,
    StateCapabilities,
    StateContext,
    StateLayer,
)
from slotline.registry.descriptor import Descriptor, Kind
from slotline.testing.reference.state.recurrences import Recurrences, State, Tensors

DTYPES = (("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16"))


@frozen
class Row:
    """Request of a batch: its index, its tokens `first` to `last` (excluded), its slot, and its initial state."""

    position: int
    first: int
    last: int
    slot: int
    has_initial_state: bool

    @property
    def num_tokens(self) -> int:
        return self.last - self.first


class ReferenceState(Recurrences):
    """Literal implementation of the contract. The state is computed in float32 for every dtype in the slots."""

    def __init__(self, context: StateContext) -> None:
        self.max_draft_tokens = context.max_draft_tokens
        self.trails: dict[str, dict[int, list[State]]] = {}  # states after each token, by layer and row position

    def plan(self, batch: StateBatch) -> list[Row]:
        """Return the rows with tokens and a slot."""
        bounds = batch.query_start_loc_cpu.tolist()
        slots = batch.slots.tolist()
        initial = batch.has_initial_state.tolist()
        rows = (Row(i, bounds[i], bounds[i + 1], slots[i], initial[i]) for i in range(batch.num_requests))
        return [row for row in rows if self.is_active(row)]

    def is_active(self, row: Row) -> bool:
        return row.slot >= 0 and row.num_tokens > 0

    def forward(self, layer: StateLayer, inputs: Tensors, state: Tensors, plan: list[Row]) -> Tensor:
        output = self.new_output(layer, inputs)
        self.trails[layer.name] = {}
        for row in plan:
            own = self.inputs_of(layer, inputs, row)
            output[row.first : row.last], new = self.advance(layer, own, self.initial(layer, state, row), row)
            self.store(state, row.slot, new)
        return output

    def new_output(self, layer: StateLayer, inputs: Tensors) -> Tensor:
        """Return zeros, so that padding is finite."""
        return torch.zeros_like(inputs["v" if layer.state_kind == "gated_delta" else "x"])

    def inputs_of(self, layer: StateLayer, inputs: Tensors, row: Row) -> dict[str, Tensor]:
        token_wise = {*STATE_KINDS[layer.state_kind].token_inputs, "z"}
        return {
            name: (value[row.first : row.last] if name in token_wise else value).float()
            for name, value in inputs.items()
        }

    def initial(self, layer: StateLayer, state: Tensors, row: Row) -> State:
        """Return the initial state of the request, in float32."""
        if row.has_initial_state:
            return {name: value[row.slot].float() for name, value in state.items()}
        return {name: torch.zeros_like(value[row.slot], dtype=torch.float32) for name, value in state.items()}

    def advance(self, layer: StateLayer, inputs: Tensors, before: State, row: Row) -> tuple[Tensor, State]:
        """Advance a request. If it may be rolled back, go token by token and keep the intermediate states."""
        if row.num_tokens > 1 + self.max_draft_tokens or self.max_draft_tokens == 0:
            return self.recur(layer, inputs, before)
        outputs, trail = [], []
        for t in range(row.num_tokens):
            token = self.inputs_of(layer, inputs, Row(0, t, t + 1, 0, True))
            output, before = self.recur(layer, token, before)
            outputs.append(output)
            trail.append(before)
        self.trails[layer.name][row.position] = trail
        return torch.cat(outputs), before

    def recur(self, layer: StateLayer, inputs: Tensors, before: State) -> tuple[Tensor, State]:
        recurrence = {
            "short_conv": self.short_conv,
            "mamba1": self.mamba1,
            "mamba2": self.mamba2,
            "gated_delta": self.gated_delta,
        }[layer.state_kind]
        return recurrence(layer.facts, inputs, before)

    def store(self, state: Tensors, slot: int, new: Mapping[str, Tensor]) -> None:
        for name, value in new.items():
            state[name][slot] = value.to(state[name].dtype)

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        for position, (slot, count) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
            if slot >= 0:
                self.store(state, slot, self.trails[layer.name][position][count - 1])

    def copy(self, layer: StateLayer, state: Tensors, source: int, target: int) -> None:
        for value in state.values():
            value[target] = value[source]


def descriptor_of(
    name: str, backend: type[StateBackend], kinds: Iterable[str] = tuple(STATE_KINDS), **capabilities: object
) -> Descriptor[StateBackend]:
    """Return a descriptor for `ReferenceState` or a subclass, which offers the given kinds."""
    offer = {
        "devices": Set(("cpu", "cuda")),
        "state_kinds": Set(kinds),
        "dtypes": Set(DTYPES),
        "rollback": Flag(True),
        "checkpoints": Flag(True),
    }
    return Descriptor(
        kind=Kind.STATE,
        name=name,
        capabilities=StateCapabilities(**{**offer, **capabilities}),  # type: ignore[arg-type]
        factory=backend,
    )


descriptor = descriptor_of("reference_state", ReferenceState)
