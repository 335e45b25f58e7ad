"""L4: captured launches, replayed after their inputs were changed in place."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch

from slotline.conformance.device.buffers import sent
from slotline.registry.contracts.device import Graph, GraphCapture
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.device import Array, DeviceUnderTest, same

NEEDS = {"graphs": True}


def captured(session: GraphCapture, step: Callable[[], object], *, replayed: bool = True) -> Graph:
    """Return a graph of a step."""
    graph = session.graph(replayed=replayed)
    graph.begin()
    step()
    graph.end()
    return graph


@check(Kind.DEVICE, "device.graphs.replay", Level.GRAPHS, needs=NEEDS, cost=0.05, profile="graphs")
def graphs_replay(run: Run) -> None:
    """A replay gives the results of the inputs as they are now, at the addresses of the capture, each time anew."""
    under_test = DeviceUnderTest(run)
    inputs = under_test.put(np.arange(24).reshape(4, 6))
    results: list[torch.Tensor] = []

    def step() -> None:
        doubled = inputs * 2
        results.extend((doubled, doubled.sum(1), torch.where(inputs > 10, inputs, -1)))

    with under_test.at_work():
        with under_test.device.graph_capture() as session:
            graph = captured(session, step)
            taken = session.finish()
        if not isinstance(taken, int) or taken < 0:
            raise Failed(f"finish() is {taken!r}, expected bytes from 0")
        places = [tensor.data_ptr() for tensor in results]
        for number in (3, -7, 0):
            values = np.arange(24).reshape(4, 6) * number
            inputs.copy_(under_test.put(values))
            graph.replay()
            wanted = (values * 2, (values * 2).sum(1), np.where(values > 10, values, -1))
            for index, (array, tensor) in enumerate(zip(wanted, results, strict=True)):
                same(array, under_test.host(tensor), f"result {index} of a replay after the inputs changed")
        if places != [tensor.data_ptr() for tensor in results]:
            raise Failed("the results of a replay are at other addresses than those of the capture")


@check(Kind.DEVICE, "device.graphs.once", Level.GRAPHS, needs=NEEDS, cost=0.03, profile="graphs")
def graphs_once(run: Run) -> None:
    """Each replay launches each captured operation once, in place ones too, in the order of the capture."""
    under_test = DeviceUnderTest(run)
    total, amount = under_test.put(np.zeros(5, np.int64)), under_test.put(np.ones(5, np.int64))

    def step() -> None:
        total.add_(amount)
        total.mul_(2)

    with under_test.at_work():
        with under_test.device.graph_capture() as session:
            graph = captured(session, step)
            session.finish()
        total.zero_()
        for count, wanted in enumerate((2, 6, 14), 1):
            graph.replay()
            same(np.full(5, wanted), under_test.host(total), f"a sum after {count} replays")


@check(Kind.DEVICE, "device.graphs.capturing", Level.GRAPHS, needs=NEEDS, cost=0.03, profile="graphs")
def graphs_capturing(run: Run) -> None:
    """`is_capturing` is True between begin and end alone, and for the thread that captures alone."""
    under_test = DeviceUnderTest(run)
    device, seen = under_test.device, dict[str, bool]()
    tensor = under_test.put(np.ones(3, np.int64))

    def ask() -> None:
        with device.scope():
            seen["in another thread"] = device.is_capturing()

    def step() -> None:
        seen["in a capture"] = device.is_capturing()
        tensor.add_(1)
        other = threading.Thread(target=ask)
        other.start()
        other.join()

    with under_test.at_work():
        with device.graph_capture() as session:
            seen["in a session"] = device.is_capturing()
            graph = captured(session, step)
            seen["after a capture"] = device.is_capturing()
            session.finish()
        graph.replay()
        seen["after a replay"] = device.is_capturing()
    wrong = [where for where, found in seen.items() if found != (where == "in a capture")]
    if wrong or "in another thread" not in seen:
        raise Failed(f"is_capturing() is wrong {', '.join(wrong)}")


@check(Kind.DEVICE, "device.graphs.several", Level.GRAPHS, needs=NEEDS, cost=0.05, profile="graphs")
def graphs_several(run: Run) -> None:
    """Graphs of one session are replayed in any order and outlive it, beside one that was dropped."""
    under_test = DeviceUnderTest(run)
    inputs, results = under_test.put(np.zeros(40, np.int64)), dict[int, torch.Tensor]()
    counts = under_test.put(np.zeros(3, np.int64))
    with under_test.at_work():
        with under_test.device.graph_capture() as session:
            graphs = []
            for number in range(3):

                def step(number: int = number) -> None:
                    results[number] = inputs * (number + 1) + number
                    counts[number].add_(1)

                captured(session, lambda: inputs.neg(), replayed=False)
                graphs.append(captured(session, step))
            session.finish()
        counts.zero_()
        for value, number in ((5, 2), (6, 0), (7, 1), (8, 1), (9, 0), (10, 2)):
            inputs.fill_(value)
            graphs[number].replay()
            wanted = np.full(40, value * (number + 1) + number)
            same(wanted, under_test.host(results[number]), f"graph {number}, replayed after others")
        graphs[1].replay()
        same(np.array([2, 3, 2]), under_test.host(counts), "replays of each graph, by what it counts")


@check(Kind.DEVICE, "device.graphs.cut", Level.GRAPHS, needs=NEEDS, cost=0.05, profile="graphs")
def graphs_cut(run: Run) -> None:
    """A step of two graphs with a call between them, that reads the first one's results, gives the whole step's."""
    under_test = DeviceUnderTest(run)
    inputs = under_test.put(np.arange(30))
    held: dict[str, torch.Tensor] = {"called": under_test.put(np.zeros(30, np.int64))}

    def before() -> None:
        held["first"] = inputs + 1

    def between() -> None:
        held["called"].copy_(held["first"] * 10)

    def after() -> None:
        held["last"] = held["called"] - held["first"]

    with under_test.at_work():
        with under_test.device.graph_capture() as session:
            graphs = captured(session, before), captured(session, after)
            session.finish()
        for number in (2, 5):
            inputs.copy_(under_test.put(np.arange(30) * number))
            graphs[0].replay()
            between()
            graphs[1].replay()
            same((np.arange(30) * number + 1) * 9, under_test.host(held["last"]), "the last result of a cut step")


@check(Kind.DEVICE, "device.graphs.uploads", Level.GRAPHS, needs=NEEDS, cost=0.05, profile="graphs")
def graphs_uploads(run: Run) -> None:
    """A graph reads what each later step uploads, since the addresses stay."""
    under_test = DeviceUnderTest(run)
    buffer, held = under_test.buffer(), dict[str, torch.Tensor]()
    with under_test.at_work():
        first, second = sent(under_test, buffer, [np.arange(6, dtype=np.int32), np.arange(3) + 1])

        def step() -> None:
            held["result"] = first.view(3, 2) * second[:, None]

        with under_test.device.graph_capture() as session:
            graph = captured(session, step)
            session.finish()
        for number in range(3):
            arrays: list[Array] = [np.arange(6, dtype=np.int32) + number, np.arange(3) * number]
            sent(under_test, buffer, arrays)
            graph.replay()
            wanted = arrays[0].reshape(3, 2) * arrays[1][:, None]
            same(wanted, under_test.host(held["result"]), f"a result of the uploads of step {number}")
