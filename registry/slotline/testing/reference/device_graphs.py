"""Graphs as lists of operations that are called again, for tensors in the host's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_here = threading.local()


def is_recording() -> bool:
    """Return True if this thread records a graph."""
    return bool(getattr(_here, "recording", False))


class RecordedGraph(TorchDispatchMode):
    """Operations between `begin` and `end`. Recording runs them as well."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], None]] = []

    def begin(self) -> None:
        _here.recording = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        _here.recording = False

    @torch.inference_mode()
    def replay(self) -> None:
        for call in self.calls:
            call()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        found = func(*args, **given)
        held = {_memory(tensor) for tensor in _tensors((args, given))}
        fresh = [_memory(tensor) not in held for tensor in _tensors(found)]
        if any(fresh) or func._schema.is_mutable:
            self.calls.append(self.again(func, args, given, found, fresh))
        return found  # an operation that only makes a view has nothing to repeat

    def again(self, func: Any, args: Any, kwargs: Any, found: Any, fresh: list[bool]) -> Callable[[], None]:
        """Return a call that runs an operation again and leaves its results where the first ones are."""

        def call() -> None:
            for old, new, copied in zip(_tensors(found), _tensors(func(*args, **kwargs)), fresh, strict=True):
                if copied:
                    old.copy_(new)

        return call


class RecordedSession:
    """Session of recordings."""

    graph_class: type[RecordedGraph] = RecordedGraph

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def graph(self, *, replayed: bool = True) -> RecordedGraph:
        return self.graph_class()

    def finish(self) -> int:
        return 0


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common if they share memory. Packed weights share with none."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()
