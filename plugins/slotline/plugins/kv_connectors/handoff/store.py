"""Blocks that other engines may load, in memory that processes of this machine can map.

A reader does not stop the writer. It copies a block and compares its checksum. A block that was overwritten meanwhile
has another one, and is lost to the reader.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from threading import Condition
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field

from slotline.registry.contracts import BlockHash, CacheBlock
from slotline.registry.errors import CapacityError

logger = logging.getLogger("slotline")
T = TypeVar("T")
Key = tuple[int, BlockHash]
"""A cache group, and the hash of the prefix that a block ends."""
WORD = 8
_MOST = 10_000
"""Prompts of which it is known that they have been computed."""
HEADER = 64
"""Bytes before the first row. They begin with the secret."""


def key_of(block: CacheBlock) -> Key:
    """Return the name of a block."""
    return block.group, block.block_hash


def copied(
    copy: Callable[[int, Sequence[int], Sequence[torch.Tensor]], T],
    blocks: Sequence[tuple[CacheBlock, torch.Tensor]],
) -> list[T]:
    """Copy blocks from or to their rows, those of a group together. Return what the copies of each group return."""
    found = list[T]()
    for group in dict.fromkeys(one.group for one, _ in blocks):
        own = [(one.block, row) for one, row in blocks if one.group == group]
        found.append(copy(group, [block for block, _ in own], [row for _, row in own]))
    return found


def checksum_of(data: npt.NDArray[np.uint8]) -> int:
    """Return the sum of the words of 64 bits of some bytes, modulo 2^64. Bytes behind the last word count as one more.

    Memory is as fast as it. It tells a block from another one, or from a mixture of two, which is what happens to a
    block that was overwritten while it was read. Other threads run meanwhile.
    """
    words = len(data) // WORD
    rest = int.from_bytes(data[WORD * words :].tobytes(), "little")
    return (int(data[: WORD * words].view(np.uint64).sum(dtype=np.uint64)) + rest) % 2**64


class Found(NamedTuple):
    """A block of the store.

    Attributes:
        place: of its first byte in the memory.
        checksum: of its bytes, see `checksum_of`.
    """

    place: int
    checksum: int


class Part(NamedTuple):
    """A block that is being written.

    Attributes:
        place: of its first byte in the memory.
        written: its first bytes that are there.
    """

    place: int
    written: int


@define(eq=False)
class _Writing:
    """A block that is being written.

    Attributes:
        row: where.
        ends: of the parts that are written, the end of each by its first byte.
        checksum: of these parts together, None if their words are not those of the block.
    """

    row: int
    ends: dict[int, int] = field(factory=dict)
    checksum: int | None = 0

    @property
    def written(self) -> int:
        """Return how many bytes are written before the first one that is not."""
        end = 0
        while end in self.ends:
            end = self.ends[end]
        return end


class _Rows:
    """Rows of one size in a part of the memory, found by a block's hash. The least recently used go first.

    Attributes:
        first, size: place of the first row, and bytes of each.
        row_of: the rows of blocks, least recently used first.
        checksums: of the blocks in these rows, by row.
        free: the others.
    """

    def __init__(self, first: int, size: int, count: int) -> None:
        self.first, self.size = first, size
        self.row_of: OrderedDict[Key, int] = OrderedDict()
        self.checksums: dict[int, int] = {}
        self.free = list(range(count - 1, -1, -1))

    def take(self, but: Collection[Key]) -> int | None:
        """Return a free row, that of the least recently used block if need be. None if all of them must stay."""
        if not self.free:
            oldest = next((one for one in self.row_of if one not in but), None)
            if oldest is None:
                return None
            self.free.append(self.row_of.pop(oldest))
        return self.free.pop()

    def place(self, row: int) -> int:
        """Return the place of a row's first byte."""
        return self.first + row * self.size


class Store:
    """Rows of memory, found by a block's hash. The least recently used go first.

    States are much larger than blocks, so they have half of the memory for themselves.

    Args:
        num_bytes: memory at most.
        sizes: bytes of a block of each cache group.
        states: the groups whose blocks are states.

    Attributes:
        path: by which processes of this machine can open the memory, while this one runs.
        secret: a text at its beginning by which they know that it is this memory.
        version: how often blocks have changed.

    Raises:
        CapacityError: if it does not hold one block of each size, or cannot be had.
    """

    def __init__(self, num_bytes: int, sizes: Sequence[int], states: Collection[int] = ()) -> None:
        self._sizes, end = tuple(sizes), HEADER
        own = [[group for group in range(len(sizes)) if (group in states) == large] for large in (False, True)]
        self._rows_of: dict[int, _Rows] = {}
        parts = [groups for groups in own if groups]
        for groups in parts:
            size = max(sizes[group] for group in groups)
            if (count := num_bytes // len(parts) // size) < 1:
                raise CapacityError(
                    f"kv_connector.handoff.memory of {num_bytes} bytes holds no block: one takes {size}",
                    fix=f"set it to '{-(-size * len(parts) // 1024)}KiB' at least",
                )
            self._rows_of |= dict.fromkeys(groups, _Rows(end, size, count))
            end += count * size
        self.secret = secrets.token_hex(HEADER // 2)
        try:
            file = os.memfd_create("slotline-handoff")
            os.ftruncate(file, end)
            self._memory = mmap.mmap(file, 0)
        except (OSError, ValueError) as error:
            raise CapacityError(f"kv_connector.handoff.memory cannot be had: {error}", fix="lower it") from error
        self._memory[:HEADER] = self.secret.encode()
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self._file = file
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._changed = Condition()
        self._taken: dict[Key, _Writing] = {}
        self._over: OrderedDict[str, float] = OrderedDict()  # prompts by name, and when they were computed
        self.version = 0

    def pin(self) -> None:
        """Register the memory with the CUDA driver, so that copies to it are asynchronous."""
        error = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), len(self._bytes), 0)
        if int(error):
            logger.warning("kv_connector.handoff.memory cannot be pinned (CUDA error %d): saves are slower", int(error))

    @property
    def memory(self) -> torch.Tensor:
        """All of the memory, [bytes] uint8. Places count from its beginning."""
        return self._bytes

    def keys(self) -> list[Key]:
        """Return the blocks that are here, least recently used first."""
        return [key for rows in dict.fromkeys(self._rows_of.values()) for key in rows.row_of]

    def holds(self, key: Key) -> bool:
        """Return whether a block is here."""
        return key in self._rows_of[key[0]].row_of

    def row(self, key: Key) -> torch.Tensor:
        """Return the bytes of a block that is here, which counts as used."""
        with self._changed:
            rows = self._rows_of[key[0]]
            rows.row_of.move_to_end(key)
            return self._row(key, rows.row_of[key])

    def take(self, keys: Sequence[Key], but: Collection[Key]) -> list[tuple[Key, torch.Tensor]]:
        """Return rows for those of some blocks that are not here yet. They are found once they are published.

        Args:
            but: blocks that must stay.
        """
        taken = list[tuple[Key, torch.Tensor]]()
        with self._changed:
            for key in keys:
                rows = self._rows_of[key[0]]
                if key in rows.row_of:
                    rows.row_of.move_to_end(key)
                elif key not in self._taken and (row := rows.take(but)) is not None:
                    self._taken[key] = _Writing(row)
                    taken.append((key, self._row(key, row)))
        return taken

    def restart(self, keys: Collection[Key]) -> None:
        """Forget the parts of blocks that are written again. Any thread may call it."""
        with self._changed:
            for key in keys:
                if (writing := self._taken.get(key)) is not None:
                    writing.ends.clear()
                    writing.checksum = 0

    def wrote(self, keys: Sequence[Key], first: int, end: int) -> None:
        """Take note of the bytes from `first` to `end` of blocks that are being written. Any thread may call it."""
        for key in keys:
            if (writing := self._taken.get(key)) is None:
                continue
            part = checksum_of(self._row(key, writing.row)[first:end].numpy())
            with self._changed:
                known = writing.checksum is not None and first not in writing.ends and not (first % WORD or end % WORD)
                writing.checksum = ((writing.checksum or 0) + part) % 2**64 if known else None
                writing.ends[first] = end
        self._change()

    def is_whole(self, key: Key) -> bool:
        """Return whether all parts of a block that was taken are written."""
        writing = self._taken.get(key)
        return writing is not None and writing.written == self._sizes[key[0]]

    def publish(self, keys: Sequence[Key]) -> None:
        """Have blocks found that were taken. Their bytes are there. Any thread may call it."""
        for key in keys:
            if (writing := self._taken.get(key)) is None:
                continue
            checksum = writing.checksum
            if checksum is None or not self.is_whole(key):
                checksum = checksum_of(self._row(key, writing.row).numpy())
            with self._changed:
                rows = self._rows_of[key[0]]
                del self._taken[key]
                rows.row_of[key], rows.checksums[writing.row] = writing.row, checksum
        self._change()

    def discard(self, keys: Sequence[Key]) -> None:
        """Give back the rows of blocks that were taken, and could not be written."""
        with self._changed:
            for key in keys:
                if (writing := self._taken.pop(key, None)) is not None:
                    self._rows_of[key[0]].free.append(writing.row)
        self._change()

    def is_over(self, name: str, *, since: float) -> bool:
        """Return whether a prompt has been computed for so many seconds, by the name that its request gave."""
        return time.monotonic() - self._over.get(name, float("inf")) >= since

    def over(self, name: str) -> None:
        """Take note that a prompt has been computed. Any thread may call it."""
        with self._changed:
            self._over[name] = time.monotonic()
            while len(self._over) > _MOST:
                self._over.popitem(last=False)
        self._change()

    def look(self, keys: Sequence[Key], version: int, timeout: float) -> tuple[int, list[Found | Part | None]]:
        """Return the version and what there is of blocks, None for those of which nothing is here.

        Args:
            version: what was seen already. Something else is waited for.
            timeout: seconds to wait.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, timeout)
            return self.version, [self._find(key) or self._part(key) for key in keys]

    def size(self, group: int) -> int:
        """Return the bytes of a block of a cache group."""
        return self._sizes[group]

    def bytes_of(self, first: int, end: int) -> memoryview:
        """Return the bytes from a place to another one."""
        return memoryview(self._memory)[first:end]

    def drop(self, key: Key) -> None:
        """Forget a block that is here."""
        with self._changed:
            rows = self._rows_of[key[0]]
            rows.free.append(rows.row_of.pop(key))

    def clear(self) -> None:
        """Forget all blocks. None may be being written."""
        for key in self.keys():
            self.drop(key)

    def close(self) -> None:
        """Let nobody open the memory any more. Those that have keep it."""
        os.close(self._file)

    def _row(self, key: Key, row: int) -> torch.Tensor:
        place = self._rows_of[key[0]].place(row)
        return self._bytes[place : place + self._sizes[key[0]]]

    def _find(self, key: Key) -> Found | None:
        """Return where a block is. The caller has the lock."""
        if (rows := self._rows_of.get(key[0])) is None or (row := rows.row_of.get(key)) is None:
            return None
        rows.row_of.move_to_end(key)
        return Found(rows.place(row), rows.checksums[row])

    def _part(self, key: Key) -> Part | None:
        """Return what is written of a block. The caller has the lock."""
        if (writing := self._taken.get(key)) is None:
            return None
        return Part(self._rows_of[key[0]].place(writing.row), writing.written)

    def _change(self) -> None:
        with self._changed:
            self.version += 1
            self._changed.notify_all()
