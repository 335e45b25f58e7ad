"""Whether what is launched will be replayed, for backends that then choose otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_alone: ContextVar[bool] = ContextVar("alone", default=False)


def is_replayed() -> bool:
    """Whether launches are captured for replays, whose steps may have no more in common with this one than its sizes.

    Not so for a step that is captured to see what it launches, and dropped: then it chooses as it does when it runs.
    """
    # Asked for each layer; whether there is a GPU would be a question to the driver.
    return is_captured() and not _alone.get()


def is_captured() -> bool:
    """Return whether launches are captured, for replays or to be looked at. Nothing may wait for the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def as_if_run() -> Iterator[None]:
    """Inside, captured launches are those of a step that runs by itself."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)
