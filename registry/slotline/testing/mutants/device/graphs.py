"""Captures with a bug."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slotline.registry.capability import Flag
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant
from slotline.testing.mutants.device.making import of_device
from slotline.testing.reference.device import HostDevice
from slotline.testing.reference.device_graphs import RecordedGraph, RecordedSession


class Frozen(RecordedGraph):
    def again(self, func: Any, args: Any, kwargs: Any, found: Any, fresh: list[bool]) -> Callable[[], None]:
        args = tuple(arg.clone() if isinstance(arg, torch.Tensor) and all(fresh) else arg for arg in args)
        return super().again(func, args, kwargs, found, fresh)


class Elsewhere(RecordedGraph):
    def again(self, func: Any, args: Any, kwargs: Any, found: Any, fresh: list[bool]) -> Callable[[], None]:
        return super().again(func, args, kwargs, found, [False] * len(fresh))


class Twice(RecordedGraph):
    @torch.inference_mode()
    def replay(self) -> None:
        for call in self.calls:
            call()
            call()


class Once(RecordedGraph):
    def replay(self) -> None:
        super().replay()
        self.calls = []


class LastFirst(RecordedGraph):
    def end(self) -> None:
        super().end()
        self.calls.reverse()


class SharedSession(RecordedSession):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def graph(self, *, replayed: bool = True) -> RecordedGraph:
        graph = RecordedGraph()
        graph.calls = self.calls
        return graph


class EndsWithSession(RecordedSession):
    def __init__(self) -> None:
        self.made: list[RecordedGraph] = []

    def graph(self, *, replayed: bool = True) -> RecordedGraph:
        self.made.append(super().graph(replayed=replayed))
        return self.made[-1]

    def __exit__(self, *error: object) -> None:
        for graph in self.made:
            graph.calls.clear()


class NegativeBytes(RecordedSession):
    def finish(self) -> int:
        return -4096


class Unaware(HostDevice):
    def is_capturing(self) -> bool:
        return False


class Aware(RecordedGraph):
    anywhere = False

    def begin(self) -> None:
        super().begin()
        Aware.anywhere = True

    def end(self) -> None:
        super().end()
        Aware.anywhere = False


class AwareSession(RecordedSession):
    graph_class = Aware


class EveryThread(HostDevice):
    session = AwareSession

    def is_capturing(self) -> bool:
        return Aware.anywhere


class WholeSession(RecordedSession):
    entered = False

    def __enter__(self) -> WholeSession:
        WholeSession.entered = True
        return self

    def __exit__(self, *error: object) -> None:
        WholeSession.entered = False


class CapturesInSessions(HostDevice):
    session = WholeSession

    def is_capturing(self) -> bool:
        return super().is_capturing() or WholeSession.entered


def _session(graph: type[RecordedGraph]) -> type[HostDevice]:
    session = type("Session", (RecordedSession,), {"graph_class": graph})
    return type("Device", (HostDevice,), {"session": session})


def _of(name: str, summary: str, device: type[HostDevice]) -> Mutant:
    return of_device(name, summary, Level.GRAPHS, device, graphs=Flag(True))


ALL: tuple[Mutant, ...] = (
    _of("freezes-values", "a replay gives the results of the captured inputs", _session(Frozen)),
    _of("results-elsewhere", "the results of a replay are at other addresses", _session(Elsewhere)),
    _of("replays-twice", "a replay launches everything twice", _session(Twice)),
    _of("replays-once", "only the first replay does anything", _session(Once)),
    _of("last-first", "a replay launches the last operation first", _session(LastFirst)),
    _of("one-graph", "all graphs of a session are one", type("Device", (HostDevice,), {"session": SharedSession})),
    _of("ends-with-session", "graphs end with their session", type("D", (HostDevice,), {"session": EndsWithSession})),
    _of("negative-bytes", "captures take negative memory", type("Device", (HostDevice,), {"session": NegativeBytes})),
    _of("unaware", "does not know that it captures", Unaware),
    _of("every-thread", "says to all threads that they capture", EveryThread),
    _of("captures-in-sessions", "says that it captures as long as a session lasts", CapturesInSessions),
)
