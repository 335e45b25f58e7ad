"""Graphs as lists of recorded operations, each of which is called again with the tensors that it had."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_recording: list[RecordedGraph] = []


def is_recording() -> bool:
    """Return whether a graph is being recorded."""
    return bool(_recording)


class RecordedGraph(TorchDispatchMode):
    """Operations between `begin` and `end`. Recording runs them as well."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Record from now on."""
        _recording.append(self)
        self.__enter__()

    def end(self) -> None:
        """Record no longer."""
        self.__exit__(None, None, None)
        _recording.remove(self)

    @torch.inference_mode()
    def replay(self) -> None:
        """Run the operations again, on the tensors of the recording."""
        for call in self._calls:
            call()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        aliases = [one.alias_info for one in func._schema.returns]
        if any(alias is None or alias.is_write for alias in aliases) or not aliases:
            self._calls.append(_again(func, args, kwargs, found, aliases))
        return found  # of an operation that only looks at memory in another way, nothing has to be done again


def _again(func: Any, args: Any, kwargs: Any, found: Any, aliases: list[Any]) -> Callable[[], None]:
    """Return what runs an operation again and leaves its results where the first ones are."""
    kept = [one for one, alias in zip(_tensors(found), aliases, strict=False) if alias is None] if aliases else []

    def call() -> None:
        again = func(*args, **kwargs)
        fresh = (one for one, alias in zip(_tensors(again), aliases, strict=False) if alias is None)
        for old, new in zip(kept, fresh, strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)

    return call


def _tensors(found: Any) -> Iterable[Any]:
    """Return an operation's results as a sequence."""
    return found if isinstance(found, tuple | list) else (found,)


class RecordedOperations:
    """Session of recordings. Implements slotline's `GraphCapture`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def graph(self, *, replayed: bool = True) -> RecordedGraph:
        """Return an empty graph."""
        return RecordedGraph()

    def finish(self) -> int:
        """Return 0: recordings take no memory of the device."""
        return 0
