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
