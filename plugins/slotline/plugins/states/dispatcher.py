"""State layers as the model sees them: a callable that routes each layer to its backend and its slots.

A request's slot is its row: a row is held from admission to the end, so slots need no pool, no table and no counting,
and a step finds them without a look-up. The price is memory for every row from the start, which `explain` and the
memory report show. A slot is never cleared: a request that has computed nothing says so, and starts from zeros. Slots
after those of the rows hold checkpoints (`checkpoints.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from slotline.builder.cache_memory import Zeros, torch_zeros
from slotline.kernels.graph_capture_state import alias_without_ownership, is_captured
from slotline.planner.state_specs import HeldStates
from slotline.registry.contracts import StateBackend, StateBatch, StateLayer
from slotline.registry.output_checks import OutputChecks, ShownBatch

Advance = Callable[[StateLayer, Mapping[str, torch.Tensor]], torch.Tensor]
State = Mapping[str, torch.Tensor]
Int = npt.NDArray[np.int64]


@define(kw_only=True, eq=False)
class StateGroup:
    """State layers of one kind and the backend that was built for them.

    `plugin` is the backend's name and package.
    """

    name: str
    backend: StateBackend
    layers: tuple[StateLayer, ...]
    plugin: str = ""


class StateDispatcher:
    """Plans each group once per step and then serves the layers' calls.

    Args:
        groups: the built backends with their layers.
        states: by layer index.
        num_slots: in each of their tensors.
        device: of the states.
        slot_bytes: bytes of a slot over all layers.
        pages: memory of the states by layer index, [num_slots, page bytes] uint8.
    """

    def __init__(
        self,
        groups: Sequence[StateGroup],
        states: Mapping[int, State],
        num_slots: int,
        device: str,
        slot_bytes: int = 0,
        pages: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.groups = tuple(groups)
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.pages = pages
        self._device = device
        self._plans: list[Any] = []
        self._checks: OutputChecks | None = None  # of the outputs of backends in the planned step, if it is eager
        self._routes = {
            layer.index: (group.backend.forward, states[layer.index], position)
            for position, group in enumerate(groups)
            for layer in group.layers
        }

    def plan(self, batch: StateBatch, checks: OutputChecks | None = None) -> Advance:
        """Plan every group for this step on the host. Return the callable that the model's layers call.

        Args:
            batch: of the step.
            checks: of the outputs of backends, if the step is eager. None for no checks.
        """
        self._checks = checks
        shown = None if checks is None else ShownBatch.of(batch)
        self._plans = [group.backend.plan(batch) for group in self.groups]
        self._batch = batch
        if shown is not None:
            shown.check(" or ".join(group.plugin for group in self.groups), "plan")
        return self.advance

    @property
    def advancing(self) -> Advance:
        """The callable of the model's layers in a planned eager step."""
        return self.advance if self._checks is None else self._advance_checked

    def advance(self, layer: StateLayer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run one layer under the step's plans and return its output, one row for each token."""
        forward, state, position = self._routes[layer.index]
        return forward(layer, inputs, state, self._plans[position])

    def _advance_checked(self, layer: StateLayer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run one layer as `advance`, and check the backend's output and batch."""
        if self._checks is None or is_captured():
            return self.advance(layer, inputs)
        plugin, shown = self.groups[self._routes[layer.index][2]].plugin, ShownBatch.of(self._batch)
        found = self.advance(layer, inputs)
        shown.check(plugin, "forward")
        self._checks.state(plugin, layer, inputs["v" if "v" in inputs else "x"], found)
        return found

    def breaking(self, names: Container[str], cut: Callable[[Callable[[], None]], None]) -> Advance:
        """Return an `advance` for capturing, which hands the layers of the groups `names` to `cut` as later calls."""
        broken = {layer.index for group in self.groups if group.name in names for layer in group.layers}

        def advance(layer: StateLayer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            if layer.index not in broken:
                return self.advance(layer, inputs)
            out = torch.empty_like(inputs["v" if "v" in inputs else "x"], memory_format=torch.contiguous_format)
            held, result = (
                {name: alias_without_ownership(tensor) for name, tensor in inputs.items()},
                alias_without_ownership(out),
            )

            def call() -> None:
                result.copy_(self.advance(layer, held))

            cut(call)
            return out

        return advance

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy a slot to another in every layer, after the work that was started and before later work."""
        for group in self.groups:
            for layer in group.layers:
                group.backend.copy(layer, self.state(layer), source, target)

    @torch.inference_mode()
    def commit(self, rows: Int, accepted: Int) -> None:
        """Make the states those after the accepted tokens of the last step, in every layer.

        Args:
            rows: [num_requests] of that step, in its order, -1 for those whose tokens all count.
            accepted: [num_requests] tokens.
        """
        pair = torch.from_numpy(np.stack([rows, accepted]).astype(np.int32)).to(self._device, non_blocking=True)
        self.commit_there(pair[0], pair[1])

    @torch.inference_mode()
    def commit_there(self, rows: torch.Tensor, accepted: torch.Tensor) -> None:
        """Commit accepted tokens that only the device knows: [num_requests] int32 each."""
        for group in self.groups:
            for layer in group.layers:
                group.backend.commit(layer, self.state(layer), rows, accepted)

    def state(self, layer: StateLayer) -> State:
        """Return the layer's tensors [num_slots, *shape] by name."""
        return self._routes[layer.index][1]


def allocate_pages(
    held: Sequence[HeldStates], num_slots: int, device: str, zeros: Zeros = torch_zeros
) -> dict[int, torch.Tensor]:
    """Return the zeroed memory of each state layer by its index, [num_slots, page bytes] uint8."""
    sizes = {layer.index: part.spec.page_bytes(layer) for part in held for layer in part.layers}
    return {index: zeros(num_slots * size, device).view(num_slots, size) for index, size in sizes.items()}


def bind_states(held: Sequence[HeldStates], pages: Mapping[int, torch.Tensor], num_slots: int) -> dict[int, State]:
    """Return the tensors [num_slots, *shape] of each state layer in its memory, by layer index and name."""
    return {layer.index: part.spec.bind(pages[layer.index], layer, num_slots) for part in held for layer in part.layers}
