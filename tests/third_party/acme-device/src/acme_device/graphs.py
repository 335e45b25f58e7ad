"""Graphs as lists of recorded operations, each of which is called again with the tensors that it had."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_thread = threading.local()


def is_recording() -> bool:
    """Return whether this thread records a graph."""
    return getattr(_thread, "recording", False)


class RecordedGraph(TorchDispatchMode):
    """Operations between `begin` and `end`. Recording runs them as well."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Record from now on."""
        _thread.recording = True
        self.__enter__()

    def end(self) -> None:
        """Record no longer."""
        self.__exit__(None, None, None)
        _thread.recording = False

    @torch.inference_mode()
    def replay(self) -> None:
        """Run the operations again, on the tensors of the recording."""
        for call in self._calls:
            call()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        found = func(*args, **given)
        held = {_memory(tensor) for tensor in _tensors((args, given))}
        fresh = [_memory(tensor) not in held for tensor in _tensors(found)]
        if any(fresh) or func._schema.is_mutable:
            self._calls.append(_again(func, args, given, found, fresh))
        return found  # of an operation that only looks at memory in another way, nothing has to be done again


def _again(func: Any, args: Any, kwargs: Any, found: Any, fresh: list[bool]) -> Callable[[], None]:
    """Return what runs an operation again and leaves its results where the first ones are."""

    def call() -> None:
        again = _tensors(func(*args, **kwargs))
        for old, new, copied in zip(_tensors(found), again, fresh, strict=True):
            if copied:
                old.copy_(new)

    return call


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    """Return what two tensors have in common that share memory. Packed weights are opaque, and share with none."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


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
