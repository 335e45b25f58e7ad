"""Blocks that other engines may load, in memory that processes of this machine can map.

A reader does not stop the writer. It copies a block and compares its checksum. A block that was overwritten meanwhile
has another one, and is lost to the reader.
"""

from __future__ import annotations

import mmap
import os
import secrets
import zlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock
from typing import NamedTuple

import torch

from slotline.registry.contracts import BlockHash
from slotline.registry.errors import CapacityError

Key = tuple[int, BlockHash]
"""A cache group, and the hash of the prefix that a block ends."""
HEADER = 64
"""Bytes before the first row. They begin with the secret."""


class Found(NamedTuple):
    """A block of the store.

    Attributes:
        row: its number.
        checksum: CRC-32 of its bytes.
    """

    row: int
    checksum: int


class Store:
    """Rows of memory, found by a block's hash. The least recently used go first.

    Args:
        num_bytes: memory at most.
        sizes: bytes of a block of each cache group.

    Attributes:
        path: by which processes of this machine can open the memory, while this one runs.
        secret: a text at its beginning by which they know that it is this memory.
        row_bytes: bytes from one row to the next.

    Raises:
        CapacityError: if it does not hold one block, or cannot be had.
    """

    def __init__(self, num_bytes: int, sizes: Sequence[int]) -> None:
        self._sizes, self.row_bytes = tuple(sizes), max(sizes)
        self._count = num_bytes // self.row_bytes
        if self._count < 1:
            raise CapacityError(
                f"kv_connector.handoff.memory of {num_bytes} bytes holds no block: one takes {self.row_bytes}",
                fix=f"set it to '{-(-self.row_bytes // 1024)}KiB' at least",
            )
        self.secret = secrets.token_hex(HEADER // 2)
        try:
            file = os.memfd_create("slotline-handoff")
            os.ftruncate(file, HEADER + self._count * self.row_bytes)
            self._memory = mmap.mmap(file, 0)
        except (OSError, ValueError) as error:
            raise CapacityError(f"kv_connector.handoff.memory cannot be had: {error}", fix="lower it") from error
        self._memory[:HEADER] = self.secret.encode()
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self._file = file
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, offset=HEADER)
        self._rows = flat.view(self._count, self.row_bytes)
        self._lock = Lock()
        self._free = list(range(self._count - 1, -1, -1))
        self._row_of: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._taken: list[tuple[Key, int]] = []

    def holds(self, key: Key) -> bool:
        """Return whether a block is here."""
        return key in self._row_of

    def row(self, key: Key) -> torch.Tensor:
        """Return the bytes of a block that is here, which counts as used."""
        with self._lock:
            self._row_of.move_to_end(key)
            return self._rows[self._row_of[key], : self._sizes[key[0]]]

    def take(self, keys: Sequence[Key], but: Collection[Key]) -> list[tuple[Key, torch.Tensor]]:
        """Return rows for those of some blocks that are not here yet. They cannot be found before `publish`.

        Args:
            but: blocks that must stay.
        """
        taken = list[tuple[Key, torch.Tensor]]()
        with self._lock:
            for key in keys:
                if key in self._row_of:
                    self._row_of.move_to_end(key)
                    continue
                if not self._free:
                    oldest = next((one for one in self._row_of if one not in but), None)
                    if oldest is None:
                        break
                    self._free.append(self._row_of.pop(oldest))
                row = self._free.pop()
                self._taken.append((key, row))
                taken.append((key, self._rows[row, : self._sizes[key[0]]]))
        return taken

    def publish(self) -> None:
        """Have the blocks of the last `take` found. Their bytes are there."""
        with self._lock:
            self._row_of.update(self._taken)
            self._taken = []

    def find(self, keys: Sequence[Key]) -> list[Found | None]:
        """Return where blocks are, None for those that are not here. Any thread may call it."""
        return [self._find(key) for key in keys]

    def bytes_of(self, row: int, group: int) -> memoryview:
        """Return the bytes of a row with a block of a cache group."""
        first = HEADER + row * self.row_bytes
        return memoryview(self._memory)[first : first + self._sizes[group]]

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._free += self._row_of.values()
            self._row_of.clear()

    def close(self) -> None:
        """Let nobody open the memory any more. Those that have keep it."""
        os.close(self._file)

    def _find(self, key: Key) -> Found | None:
        with self._lock:
            if (row := self._row_of.get(key)) is None:
                return None
            self._row_of.move_to_end(key)
        checksum = zlib.crc32(self.bytes_of(row, key[0]))
        with self._lock:  # nobody has written to it meanwhile
            return Found(row, checksum) if self._row_of.get(key) == row else None
