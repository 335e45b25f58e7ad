"""State kernels that read ahead of the kernels in front of them: the states are the same as with a wait in between.

Sizes are those of benchmarks/state_gpu.py: a kernel takes long enough that the next one's programs start beside it.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from repository import ROOT

pytest.importorskip("triton")

from negotiation_cases import CPU, GPU

from slotline.backends.triton_state import descriptor
from slotline.backends.triton_state.backend import EARLIEST, TritonState
from slotline.backends.triton_state.convolution import Convolution
from slotline.backends.triton_state.order import Order
from slotline.backends.triton_state.rows import Rows
from slotline.registry.contracts.state import STATE_KINDS, StateContext
from slotline.testing.environments.state import Part, make_problem, surround
from slotline.testing.subject import Subject

BENCHMARK: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "state_gpu.py"))
REQUESTS, SLOTS = 64, 70
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < EARLIEST,
    reason="needs a GPU whose kernels may start early",
)


class World:
    """A backend, the states of three layers of one kind, and inputs of a token each."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.layer = BENCHMARK["layer_of"](kind)
        self.backend = TritonState(
            StateContext(
                contract=1,
                layers=(self.layer,),
                device="cuda",
                dtype="bfloat16",
                max_query_len=64,
                max_requests=SLOTS,
                max_tokens=SLOTS,
            )
        )
        self.states = [BENCHMARK["state_of"](self.layer, SLOTS) for _ in range(3)]
        self.inputs = [BENCHMARK["inputs_of"](kind, REQUESTS) for _ in range(3)]
        self.slots = torch.randperm(SLOTS, device="cuda")[:REQUESTS].int()
        self.slots[5] = -1
        self.batch = BENCHMARK["batch_of"]((1,) * REQUESTS, self.slots, known=True)
        self.start = [{name: tensor.clone() for name, tensor in state.items()} for state in self.states]

    def reset(self) -> None:
        for state, start in zip(self.states, self.start, strict=True):
            for name, tensor in state.items():
                tensor.copy_(start[name])
        torch.cuda.synchronize()

    def run(self, layers: Sequence[int], plan: Any, *, waits: bool = False) -> list[torch.Tensor]:
        """Forwards of layers in this order under one plan; with `waits` each has ended before the next begins, else the
        device is held up until all are launched.
        """
        found = []
        if not waits and not torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(20_000_000)
        for layer in layers:
            if waits:
                torch.cuda.synchronize()
            found.append(self.backend.forward(self.layer, self.inputs[layer], self.states[layer], plan))
        return found

    def snapshot(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        torch.cuda.synchronize()
        return [tensor.clone() for tensor in (*outputs, *(t for state in self.states for t in state.values()))]


ORDERS = {"one": (0,) * 12, "two in turn": (0, 1) * 6, "all": (0, 1, 2, 2, 1, 0, 0, 1, 2)}


@on_gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_forwards_behind_each_other_see_what_the_ones_before_wrote(kind: str, order: str) -> None:
    world = World(kind)
    wanted = world.snapshot(world.run(ORDERS[order], world.backend.plan(world.batch), waits=True))
    for _ in range(10):
        world.reset()
        found = world.snapshot(world.run(ORDERS[order], world.backend.plan(world.batch)))
        assert all(map(torch.equal, found, wanted))


@on_gpu
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_replays_behind_each_other_see_what_the_ones_before_wrote(kind: str) -> None:
    """Slots change between them, by a kernel in front of the replay as by a copy from the host."""
    world = World(kind)
    turns = [torch.randperm(SLOTS, device="cuda")[:REQUESTS].int() for _ in range(6)]

    def steps(work: Any, *, waits: bool) -> list[torch.Tensor]:
        world.reset()
        if not waits:
            torch.cuda._sleep(20_000_000)
        for turn in turns:
            world.slots.copy_(turn)
            work()
            if waits:
                torch.cuda.synchronize()
        return world.snapshot([])

    def forwards() -> None:
        world.run((0, 1, 2), world.backend.plan(world.batch), waits=True)

    wanted = steps(forwards, waits=True)
    plan = world.backend.plan(world.batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.run((0, 1, 2), plan)
    for _ in range(10):
        assert all(map(torch.equal, steps(graph.replay, waits=False), wanted))


@on_gpu
def test_without_the_order_states_are_read_that_are_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests above can fail."""
    world = World("short_conv")
    wanted = world.snapshot(world.run(ORDERS["one"], world.backend.plan(world.batch), waits=True))
    monkeypatch.setattr(Order, "launch", lambda self, state: True)
    differ = 0
    for _ in range(10):
        world.reset()
        found = world.snapshot(world.run(ORDERS["one"], world.backend.plan(world.batch)))
        differ += not all(map(torch.equal, found, wanted))
    assert differ


def test_states_are_read_ahead_if_a_launch_that_waited_lies_behind_what_wrote_them() -> None:
    states, order = [torch.empty(1) for _ in range(3)], Order()
    assert [order.launch(states[index]) for index in (0, 1, 2, 1, 0, 2, 2)] == [0, 1, 1, 0, 1, 1, 0]
    order.begin()
    assert [order.launch(states[index]) for index in (2, 0, 1)] == [0, 1, 1]


def test_what_else_writes_states_makes_the_next_launch_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any device: whether each of a row of decodes is told that it may read ahead."""
    told: list[bool] = []
    decode = Convolution.decode

    def recorded(self: Convolution, facts: Any, inputs: Any, state: Any, out: Any, rows: Rows) -> None:
        told.append(rows.ahead)
        decode(self, facts, inputs, state, out, rows)

    monkeypatch.setattr(Convolution, "decode", recorded)
    problem = make_problem("short_conv", ("float32", "float32"), {"channels": 8, "width": 4, "activation": "silu"})
    device = GPU if torch.cuda.is_available() else CPU
    subject = Subject(descriptor=descriptor, device=device, capabilities=descriptor.capabilities, contract=1)
    around = surround(subject, [problem] * 2, num_slots=4)
    backend, layer = around.backend, problem.layer
    one, two = ([Part(1, (problem.tokens(count, seed=1),) * 2, True)] for count in (1, 2))
    plans = {count: backend.plan(around.batch(parts)) for count, parts in ((1, one), (2, two))}

    def forward(place: int, parts: list[Part]) -> None:
        backend.forward(layer, around.inputs(place, parts)[0], around.state(place), plans[parts[0].count])

    def decoded(*places: int) -> list[bool]:
        told.clear()
        for place in places:
            forward(place, one)
        return told

    backend.plan(plans[1])
    assert decoded(0, 1, 0, 0, 1) == [False, True, False, False, True]
    backend.plan(plans[1])
    assert decoded(1, 0) == [False, True], "a step has begun"
    backend.copy(layer, around.state(1), 1, 2)
    assert decoded(1, 0) == [False, True], "states were copied"
    forward(1, two)
    assert decoded(1, 0) == [False, True], "a prompt has written them"
    backend.commit(layer, around.state(1), plans[2].slots, plans[2].num_accepted)
    assert decoded(1) == [False], "drafts were taken back"
