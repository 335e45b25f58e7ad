"""Slots of states: how many fit into memory, and their tensors with the backends that work on them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attrs import evolve

from slotline.builder.parts import Parts
from slotline.builder.sizing import room_for
from slotline.planner.state_specs import HeldStates
from slotline.plugins.states.dispatcher import StateDispatcher, StateGroup, allocate_pages, bind_states
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts import Device, StateContext
from slotline.registry.descriptor import Kind
from slotline.registry.engine_reports import DeviceMemory
from slotline.registry.errors import CapacityError
from slotline.registry.negotiation import StateGroupPlan

logger = logging.getLogger("slotline")

CHECKPOINT_SHARE = 0.25
"""Share of the memory left by rows that `auto` gives to checkpoints, which are only of use together with blocks."""


def build_dispatcher(parts: Parts, held: Sequence[HeldStates]) -> StateDispatcher:
    """Build the state backends, and slots for rows and checkpoints in every state layer.

    Args:
        parts: of the engine.
        held: the cache specs of the model's states.

    Raises:
        CapacityError: if the states do not fit into memory.
    """
    planned, rows = parts.planned, parts.rows
    memory = planned.plan.states
    assert memory is not None
    own = [evolve(one, layers=planned.stages.own(one.layers)) for one in held]
    num_slots = count_slots(
        slot_bytes(own),
        rows.max_requests,
        memory.checkpoints,
        planned.loaded.config.cache.memory,
        DeviceMemory(device=planned.device, total=planned.plan.device.total_memory, block=0),
        explicit=planned.loaded.origins["cache.memory"].kind != "default",
        beside=memory.rollback_bytes // rows.max_requests,
        device=None if planned.on_host else planned.hardware[planned.device],
    )
    num_slots = parts.agree(num_slots)
    if planned.plan.prefix_caching and num_slots == rows.max_requests:
        logger.warning("no slots for checkpoints of states, so that no prefix is reused: see state.checkpoints")
    groups = [
        _group(parts, evolve(group, layers=planned.stages.own(group.layers)))
        for group in planned.plan.state_groups
        if planned.stages.own(group.layers)
    ]
    zeros = {device: found.zeros for device, found in planned.hardware.items()}
    pages = allocate_pages(own, num_slots, planned.device, lambda count, device: zeros[device](count))
    states = bind_states(own, pages, num_slots)
    return StateDispatcher(groups, states, num_slots, planned.device, slot_bytes(own), pages)


def slot_bytes(held: Sequence[HeldStates]) -> int:
    """Return the bytes of a slot over all layers."""
    return sum(one.spec.page_bytes(layer) for one in held for layer in one.layers)


def _group(parts: Parts, group: StateGroupPlan) -> StateGroup:
    """Build the backend of a group of state layers."""
    planned, config = parts.planned, parts.planned.loaded.config
    descriptor = planned.offers[Kind.STATE, group.backend]
    context = StateContext(
        contract=group.contract,
        layers=group.layers,
        device=planned.device,
        dtype=group.dtype,
        max_query_len=group.max_query_len,
        max_requests=config.scheduler.max_requests,
        max_tokens=config.scheduler.max_batched_tokens,
        max_draft_tokens=config.drafter.tokens if planned.drafter else 0,
        options=planned.options(descriptor),
    )
    backend = parts.build(descriptor, context, "lower scheduler.max_requests")
    plugin = planned.registry.full_name(descriptor)
    return StateGroup(name=group.name, backend=backend, layers=group.layers, plugin=plugin)


def count_slots(
    each: int,
    num_rows: int,
    checkpoints: int | str,
    asked: float | str,
    memory: DeviceMemory,
    *,
    explicit: bool,
    beside: int = 0,
    device: Device | None = None,
) -> int:
    """Count the slots for states before they are allocated: one for each row, and those for checkpoints.

    Args:
        each: bytes of a slot over all state layers.
        num_rows: rows of the scheduler.
        checkpoints: number of checkpoints, or ``auto``: as many as rows, within `CHECKPOINT_SHARE` of the memory that
            rows leave.
        asked: as for `size_pool`.
        explicit: as for `size_pool`.
        memory: of the device that holds the states.
        beside: further bytes that backends hold for each row. Not counted if `asked` is a size for the cache only.
        device: holds the states; None if they lie in the host's memory.

    Raises:
        CapacityError: naming the number of rows, or of checkpoints, that would fit.
    """
    room = size_in_bytes(asked) if isinstance(asked, str) else room_for(memory, asked, explicit=explicit, device=device)
    row = each if isinstance(asked, str) else each + beside
    fits = max(room, 0) // max(row, 1)
    if num_rows > fits:
        what = "states" if row == each else "states, and their copies for drafts that fall,"
        raise CapacityError(
            f"the {what} of scheduler.max_requests = {num_rows} requests take {num_rows * row} bytes, {row} each, "
            f"and cache.memory = {asked!r} leaves {max(room, 0)}",
            fix=f"set scheduler.max_requests = {fits}" if fits else "raise cache.memory",
        )
    if isinstance(checkpoints, str):
        checkpoints = min(num_rows, int(CHECKPOINT_SHARE * (room - num_rows * row)) // max(each, 1))
    elif num_rows * row + checkpoints * each > room:
        raise CapacityError(
            f"state.checkpoints = {checkpoints} beside the states of {num_rows} requests take "
            f"{num_rows * row + checkpoints * each} bytes, {each} each, and cache.memory = {asked!r} leaves "
            f"{max(room, 0)}",
            fix=f"set state.checkpoints = {(room - num_rows * row) // max(each, 1)}, or raise cache.memory",
        )
    return num_rows + checkpoints
