"""What to say where memory ends while an engine is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slotline.registry.errors import CapacityError


@contextmanager
def fits(what: str, fix: str) -> Iterator[None]:
    """Around whatever takes memory while an engine is built.

    Raises:
        CapacityError: if there is not enough; names `what` and `fix`.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CapacityError(f"{what} does not fit into memory", fix=fix) from error
