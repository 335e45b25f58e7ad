"""State layers as the model sees them: one callable that routes each layer to its backend and its slots.

A request's slot is its row: a row is held from admission to the end, so slots need no pool, no table and no counting,
and a step finds them without a look-up. The price is memory for every row from the start, which `explain` and the
memory report show. A slot is never cleared: a request that has computed nothing says so, and starts from zeros. Slots
behind those of the rows hold checkpoints (`slotline.core.cache.checkpoints`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, evolve

from slotline.core.cache.checkpoints import interval_of
from slotline.core.cache.memory import zeroed_bytes
from slotline.core.execution.attention import unowned
from slotline.core.execution.output_checks import OutputChecks, ShownBatch
from slotline.registry.contracts import StateBackend, StateBatch, StateLayer, StateTensorSpec
from slotline.registry.contracts.state import STATE_KINDS
from slotline.registry.errors import ModelError
from slotline.registry.negotiation import Plan
from slotline.registry.negotiation.state_memory import StateMemory

Advance = Callable[[StateLayer, Mapping[str, torch.Tensor]], torch.Tensor]
State = Mapping[str, torch.Tensor]
Int = npt.NDArray[np.int64]

ALIGNMENT = 128
"""Bytes; where a tensor begins in a slot's page, and what the page is padded to. Kernels load whole vectors."""


@define(kw_only=True, eq=False)
class StateGroup:
    """State layers of one kind and the backend that was built for them.

    `plugin` is the backend's name and who brings it.
    """

    name: str
    backend: StateBackend
    layers: tuple[StateLayer, ...]
    plugin: str = ""


class StateRouter:
    """Plans each group once per step and then serves the layers' calls.

    Args:
        groups: what was built.
        states: by layer index.
        num_slots: in each of their tensors.
        device: where they lie.

    Attributes:
        checks: of what backends give in eager steps; None for none.
    """

    checks: OutputChecks | None = None

    def __init__(self, groups: Sequence[StateGroup], states: Mapping[int, State], num_slots: int, device: str) -> None:
        self.groups = tuple(groups)
        self.num_slots = num_slots
        self._device = device
        self._plans: list[Any] = []
        self._routes = {
            layer.index: (group.backend.forward, states[layer.index], position)
            for position, group in enumerate(groups)
            for layer in group.layers
        }

    def plan(self, batch: StateBatch) -> Advance:
        """Host work of every group for this step; returns the callable that the model's layers call."""
        shown = None if self.checks is None else ShownBatch.of(batch)
        self._plans = [group.backend.plan(batch) for group in self.groups]
        self._batch = batch
        if shown is not None:
            shown.check(" or ".join(group.plugin for group in self.groups), "plan")
        return self.advance

    @property
    def advancing(self) -> Advance:
        """What the model's layers call in an eager step that is planned."""
        return self.advance if self.checks is None else self._advance_checked

    def advance(self, layer: StateLayer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One layer under the step's plans: its output, one row for each token."""
        forward, state, position = self._routes[layer.index]
        return forward(layer, inputs, state, self._plans[position])

    def _advance_checked(self, layer: StateLayer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """As `advance`; the backend's output and its batch are looked at."""
        assert self.checks is not None
        plugin, shown = self.groups[self._routes[layer.index][2]].plugin, ShownBatch.of(self._batch)
        found = self.advance(layer, inputs)
        shown.check(plugin, "forward")
        self.checks.state(plugin, layer, inputs["v" if "v" in inputs else "x"], found)
        return found

    def breaking(self, names: Container[str], cut: Callable[[Callable[[], None]], None]) -> Advance:
        """An `advance` for capturing: the layers of the groups `names` are handed to `cut` as calls to make later."""
        broken = {layer.index for group in self.groups if group.name in names for layer in group.layers}

        def advance(layer: StateLayer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            if layer.index not in broken:
                return self.advance(layer, inputs)
            out = torch.empty_like(inputs["v" if "v" in inputs else "x"], memory_format=torch.contiguous_format)
            held, result = {name: unowned(tensor) for name, tensor in inputs.items()}, unowned(out)

            def call() -> None:
                result.copy_(self.advance(layer, held))

            cut(call)
            return out

        return advance

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy a slot to another, in every layer; behind what was started and before what follows."""
        for group in self.groups:
            for layer in group.layers:
                group.backend.copy(layer, self.state(layer), source, target)

    @torch.inference_mode()
    def commit(self, rows: Int, accepted: Int) -> None:
        """Make the states those after the accepted tokens of the last step, in every layer.

        Args:
            rows: [num_requests] of that step, in its order; -1 for those whose tokens all count.
            accepted: [num_requests] tokens.
        """
        pair = torch.from_numpy(np.stack([rows, accepted]).astype(np.int32)).to(self._device, non_blocking=True)
        self.commit_there(pair[0], pair[1])

    @torch.inference_mode()
    def commit_there(self, rows: torch.Tensor, accepted: torch.Tensor) -> None:
        """The same with what the device alone knows: [num_requests] int32 each."""
        for group in self.groups:
            for layer in group.layers:
                group.backend.commit(layer, self.state(layer), rows, accepted)

    def state(self, layer: StateLayer) -> State:
        """The layer's tensors [num_slots, *shape] by name."""
        return self._routes[layer.index][1]


def with_state_memory(plan: Plan, num_rows: int, checkpoints: int | str) -> Plan:
    """The same plan with what its states take, if the model keeps any.

    Args:
        num_rows: rows of the scheduler.
        checkpoints: as `state.checkpoints` says.
    """
    layers = [layer for group in plan.state_groups for layer in group.layers]
    if not layers:
        return plan
    unit = lcm(*(group.block_size for group in plan.cache_groups)) if plan.cache_groups else plan.block_size
    memory = StateMemory(
        slot_bytes=sum(map(page_bytes, layers)),
        used_bytes=sum(_num_bytes(tensor) for layer in layers for tensor in layer.tensors),
        num_layers=len(layers),
        num_rows=num_rows,
        alignment=ALIGNMENT,
        checkpoints=checkpoints if plan.prefix_caching else 0,
        unit=unit,
        interval=interval_of(unit),
        rollback_bytes=num_rows
        * sum(
            _num_bytes(tensor)
            for group in plan.state_groups
            if group.rollback_copy
            for layer in group.layers
            for tensor in layer.tensors
        ),
    )
    return evolve(plan, states=memory)


def refuse_unfit_states(layers: Sequence[StateLayer]) -> None:
    """Refuse state tensors that are not what the facts of their layer's kind make them, before anything is allocated.

    Raises:
        ModelError: naming the layer, the tensor, and both shapes.
    """
    for layer in layers:
        for tensor in layer.tensors:
            if tensor.num_elements < 1 or min(tensor.shape, default=1) < 1:
                raise _unfit(layer, f"its state {tensor.name!r} of shape {list(tensor.shape)} holds nothing")
            if tensor.dtype != "auto" and not isinstance(getattr(torch, tensor.dtype, None), torch.dtype):
                raise _unfit(layer, f"its state {tensor.name!r} has dtype {tensor.dtype!r}, which is no torch dtype")
        kind = STATE_KINDS.get(layer.state_kind)
        if kind is None:
            continue  # a plugin's own; whether a backend serves it is negotiated
        if missing := sorted(name for sizes in kind.tensors.values() for name in sizes if _fact(layer, name) is None):
            raise _unfit(layer, f"a {layer.state_kind} layer needs the facts {', '.join(missing)}")
        wanted = {name: tuple(_fact(layer, size) for size in sizes) for name, sizes in kind.tensors.items()}
        found = {tensor.name: tensor.shape for tensor in layer.tensors}
        if wanted != found:
            raise _unfit(
                layer, f"its facts make its states {_shapes(wanted)}, and its page is laid out for {_shapes(found)}"
            )


def _fact(layer: StateLayer, size: str) -> int | None:
    """A size of a state: a fact, or one less than it."""
    name, _, less = size.partition(" - ")
    value = layer.facts.get(name)
    return None if value is None else int(value) - int(less or 0)


def _shapes(shapes: Mapping[str, Sequence[int | None]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none"


def _unfit(layer: StateLayer, text: str) -> ModelError:
    return ModelError(
        f"state layer {layer.name!r} (kind {layer.state_kind!r}): {text}",
        fix="correct the checkpoint's config.json; if it is right, tell the author of the model family",
    )


def page_bytes(layer: StateLayer) -> int:
    """Bytes that one slot takes in a layer, padding included."""
    return sum(_aligned(_num_bytes(tensor)) for tensor in layer.tensors)


def allocate(layer: StateLayer, num_slots: int, device: str) -> State:
    """The layer's tensors [num_slots, *shape], all in one page for each slot, so that the stride is the page's."""
    page = page_bytes(layer)
    raw = zeroed_bytes(num_slots * page, device).view(num_slots, page)
    found, first = {}, 0
    for tensor in layer.tensors:
        part = raw[:, first : first + _num_bytes(tensor)]
        found[tensor.name] = part.view(_dtype(tensor)).unflatten(1, tensor.shape)
        first += _aligned(_num_bytes(tensor))
    return found


def _num_bytes(tensor: StateTensorSpec) -> int:
    return tensor.num_elements * _dtype(tensor).itemsize


def _dtype(tensor: StateTensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
