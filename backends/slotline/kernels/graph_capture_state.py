"""State of graph capture, for backends that choose differently for replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_alone: ContextVar[bool] = ContextVar("alone", default=False)


def is_replayed() -> bool:
    """Return True if launches are captured for replays, whose steps may have only the sizes in common with this one.

    False for a dry-run capture, which only records the launches and chooses like an eager step.
    """
    # Asked for each layer; whether there is a GPU would be a question to the driver.
    return is_captured() and not _alone.get()


def is_captured() -> bool:
    """Return whether launches are captured, for replays or to be looked at. Nothing may wait for the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def as_if_run() -> Iterator[None]:
    """Let captured launches inside be those of an eager step."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def alias_without_ownership(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory without owning it, for memory that the pool of captured graphs may reuse.

    Replays run in the order of their capture, so memory that the forward pass frees in the middle of a capture can
    serve the rest of it, and every later capture, as it does in an eager run.
    """
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, span * tensor.element_size()
    )
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())
