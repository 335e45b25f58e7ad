"""Copies beside forward passes: what they wait for, and that they bring the right bytes in pieces."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attrs import define, field

from slotline.plugins.kv_connectors.stores.copies import Copies
from slotline.plugins.kv_transfer import block_copy
from slotline.plugins.kv_transfer.block_copy import CacheBlockCopy
from slotline.registry.contracts import BlockCopy

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89)]


@define(eq=False)
class Event:
    """Event of a queue."""

    name: str
    over: bool = False

    def query(self) -> bool:
        return self.over


@define(eq=False)
class Queue:
    """Queue that works at once, and notes what it would have waited for."""

    name: str
    log: list[str]
    events: list[Event] = field(factory=list)

    def scope(self) -> Any:
        return nullcontext()

    def wait_for_compute(self) -> None:
        self.log.append(f"{self.name} waits for compute")

    def compute_waits(self) -> None:
        self.log.append(f"compute waits for {self.name}")

    def record(self, *, copies: bool) -> Event:
        self.events.append(Event(f"{self.name if copies else 'compute'} {len(self.events)}"))
        return self.events[-1]

    def wait(self, event: Event, *, copies: bool) -> None:
        self.log.append(f"{self.name if copies else 'compute'} waits for {event.name}")


@define
class Device:
    """A pool on a device whose queues note what they do."""

    log: list[str] = field(factory=list)
    queues: list[Queue] = field(factory=list)
    pool: torch.Tensor = field(factory=lambda: torch.randint(0, 256, (12, 1, 64), dtype=torch.uint8))

    def copy(self) -> CacheBlockCopy:
        def queue(_: torch.device) -> Queue:
            self.queues.append(Queue(("saves", "loads", "rows", "blocks")[len(self.queues)], self.log))
            return self.queues[-1]

        return CacheBlockCopy([[self.pool[..., :24], self.pool[..., 24:]]], queue)  # type: ignore[arg-type]


def test_blocks_are_written_in_pieces_and_the_computations_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "BESIDE_BYTES", 128)
    device = Device()
    copy, rows = device.copy(), torch.randint(0, 256, (5, 64), dtype=torch.uint8)
    is_over = copy.begin_to_device(0, [1, 4, 5, 9, 11], list(rows))
    assert torch.equal(device.pool[[1, 4, 5, 9, 11], 0], rows)
    assert "blocks waits for compute" in device.log
    assert not [line for line in device.log if line.startswith("compute waits")]
    written = device.queues[3]
    assert [line for line in device.log if "waits for rows" in line] == [f"blocks waits for rows {i}" for i in range(3)]
    assert "rows waits for blocks 0" in device.log  # the first buffer is used for the third piece
    assert not is_over()
    for event in written.events[:-1]:
        event.over = True
    assert not is_over()
    written.events[-1].over = True
    assert is_over()


def test_a_save_waits_for_loads_that_read_its_rows_and_a_load_for_saves() -> None:
    device = Device()
    copy, rows = device.copy(), torch.zeros((4, 64), dtype=torch.uint8)
    saved = copy.begin_to_host(0, [3, 7], [rows[0], rows[1]])
    assert torch.equal(rows[:2], device.pool[[3, 7], 0])
    assert not saved()
    device.queues[0].events[-1].over = True
    assert saved()
    copy.begin_to_device(0, [1, 2], [rows[0], rows[1]])
    assert f"rows waits for {device.queues[0].events[-1].name}" in device.log
    device.log.clear()
    copy.to_host(0, [5], [rows[2]])
    assert not [line for line in device.log if line.startswith("saves waits for rows")]
    copy.to_host(0, [6], [rows[1]])
    assert [line for line in device.log if line.startswith("saves waits for rows")] == ["saves waits for rows 0"]
    device.queues[2].events[0].over = True
    device.log.clear()
    copy.to_host(0, [6], [rows[1]])
    assert not [line for line in device.log if line.startswith("saves waits for rows")]


def test_a_layers_part_is_copied_alone_and_waits_for_loads_that_read_its_rows() -> None:
    device = Device()
    copy, rows = device.copy(), torch.zeros((3, 64), dtype=torch.uint8)
    saved = copy.begin_layer_to_host(0, 1, [3, 7], [rows[0], rows[1]])
    assert torch.equal(rows[:2, 24:], device.pool[[3, 7], 0, 24:])
    assert not rows[:, :24].any()
    assert not saved()
    device.queues[0].events[-1].over = True
    assert saved()
    copy.begin_to_device(0, [1], [rows[0]])
    device.log.clear()
    copy.begin_layer_to_host(0, 1, [5], [rows[0]])
    assert [line for line in device.log if line.startswith("saves waits for rows")] == ["saves waits for rows 0"]
    copy.begin_layer_to_host(0, 0, [5], [rows[0]])
    assert torch.equal(rows[0], device.pool[5, 0])


def test_copies_that_know_only_the_order_of_the_stream_do() -> None:
    """Something that a plugin puts in the place of the engine's copies has two methods."""

    class InOrder(BlockCopy):
        def to_host(self, group: int, blocks: Any, rows: Any) -> None:
            seen.append(("to_host", *blocks))

        def to_device(self, group: int, blocks: Any, rows: Any) -> None:
            seen.append(("to_device", *blocks))

    seen = list[tuple[Any, ...]]()
    copies, row = Copies(InOrder(), []), torch.zeros(4, dtype=torch.uint8)
    assert copies.begin_to_host(0, [3], [row])()
    assert copies.begin_to_device(0, [4], [row])()
    assert seen == [("to_host", 3), ("to_device", 4)]
