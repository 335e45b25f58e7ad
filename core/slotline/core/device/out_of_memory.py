"""Recognition of the errors that torch and numpy raise where memory ends."""

from __future__ import annotations

import torch

_SAID = ("can't allocate memory", "error: out of memory", "STATUS_ALLOC_FAILED")
"""Parts of a RuntimeError's text: torch's CPU allocator, pinned memory, and the workspaces of a device's libraries."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, says that memory has ended."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(part in str(error) for part in _SAID):
            return True
        error = error.__cause__
    return False
