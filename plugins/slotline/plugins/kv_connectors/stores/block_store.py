"""What a connector with staging rows asks of a store: keys in the engine's thread, bytes in others."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from slotline.registry.contracts import BlockHash

logger = logging.getLogger("slotline")

Bytes = npt.NDArray[np.uint8]


class Key(NamedTuple):
    """Name of a block in a store."""

    group: int
    block_hash: BlockHash


class Fault(Enum):
    """Reason why a block was not read. Its text is a label of the metrics."""

    MISSING = "missing"
    TRUNCATED = "truncated"
    FOREIGN = "foreign"
    VERSION = "other_version"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"


Read = Fault | Exception | None
"""End of a read: None if it went well."""


class Place(NamedTuple):
    """Place of a block in shared memory.

    Attributes:
        offset: of its first byte.
        size: in bytes.
    """

    offset: int
    size: int


class RowReaders(Protocol):
    """What reads blocks into rows of memory that processes share. Only the engine's thread calls it.

    Attributes:
        works: whether it reads what it is asked for from now on.
    """

    works: bool

    def ask(self, places: Sequence[tuple[int, Key, Place]], *, beside: bool) -> None:
        """Have blocks read into their places.

        Args:
            places: each with a number that names it.
            beside: whether steps of others run meanwhile, which shall not become longer.
        """
        ...

    def poll(self) -> list[tuple[int, Read]]:
        """Return the numbers of the reads that have ended since the last call, and how they ended."""
        ...

    def lost(self) -> list[int]:
        """Return the numbers of what will not be read any more, each once. Nobody writes to their rows."""
        ...


class BlockStore(Protocol):
    """Store of blocks by their keys.

    `write` and `read` run in other threads, several at a time. All other methods run in the engine's thread and must
    not wait for anything slower than memory.
    """

    def held(self, keys: Sequence[Key]) -> list[bool]:
        """Return for each key whether its block could be read now. Blocks that are being written do not count."""
        ...

    def reserve(self, keys: Sequence[Key], busy: Collection[Key]) -> list[Any]:
        """Make room for distinct blocks that are not held.

        Args:
            busy: blocks that must not make way.

        Returns:
            A ticket for each block that may be written, and None for each that may not.
        """
        ...

    def write(self, ticket: Any, data: Bytes) -> bool:
        """Write a block. Return False if it could not be written."""
        ...

    def settle(self, ticket: Any, *, written: bool) -> None:
        """Take note of the end of a write."""
        ...

    def used(self, keys: Sequence[Key]) -> None:
        """Take note that blocks are of use."""
        ...

    def read(self, key: Key, data: Bytes) -> Fault | None:
        """Read a block into `data`. Return why not, if it could not be read."""
        ...

    def lost(self, key: Key) -> None:
        """Take note that a block could not be read."""
        ...

    def refresh(self) -> None:
        """Take note of what others have done to the store. Called before steps."""
        ...

    def reset(self) -> None:
        """Forget all blocks, and keep later ones apart from those of before and from others' blocks."""
        ...


class Counts:
    """Events of a store by their names, for metrics. Each kind of fault is logged once.

    Args:
        name: of the connector, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._events: Counter[str] = Counter()
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def add(self, event: str, number: int = 1) -> None:
        """Count events."""
        with self._lock:
            self._events[event] += number

    def fault(self, event: str, text: str, *values: object) -> None:
        """Count a fault, and log it if it is the first of its kind."""
        with self._lock:
            self._events[event] += 1
            said = event in self._said
            self._said.add(event)
        if not said:
            logger.warning(f"%s: {text} (further ones are counted as %r)", self._name, *values, event)

    def all(self) -> Mapping[str, int]:
        """Return the number of each event so far."""
        with self._lock:
            return dict(self._events)
