"""File in memory that several processes map: a header, a table of entries, and a slot for the bytes of each entry.

Changes of the table are made under a lock that the kernel releases when its holder dies (`flock`). Readers take no
lock. A reader copies a slot, then looks whether the entry is still of the same generation, and compares the checksum.
So it is safe to evict a block that another process reads: that process has a miss.

A block may lie in some slots only, as in the caches of processors: its hash gives a set of `WAYS` slots or some more.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from slotline.plugins.kv_connectors.stores.block_store import Bytes, Fault, Key
from slotline.registry.errors import CapacityError, ConfigError

VERSION = 1
MAGIC = b"SLOTKVS\0"
WAYS = 16
HEADER_BYTES = 4096
STALE_SECONDS = 60.0
"""Time after which a block that is still being written is given up, whoever writes it."""
LOCK_SECONDS = 0.002
"""Time that a step waits for the lock at most. What was to be saved is left out otherwise."""
FREE, WRITING, VALID = range(3)
_HEADER = struct.Struct("<8sIIQQ64s")
_ENTRY = np.dtype(
    [
        ("tag", "<u8"),  # the first bytes of the key
        ("key", "<u8", 4),  # SHA-256 of group and hash
        ("generation", "<u8"),  # times that the slot was given to a block
        ("used", "<i8"),  # time of the last use
        ("since", "<f8"),  # when it was given
        ("owner", "<u4"),  # process that writes it
        ("state", "<u4"),
        ("checksum", "<u4"),  # CRC-32 of key and bytes
        ("length", "<u4"),
    ]
)


class LockedError(OSError):
    """The lock was not free in time."""


@frozen
class Slot:
    """Slot that a block was given, for one generation."""

    index: int
    generation: int
    digest: bytes


class SharedTable:
    """Blocks in a mapped file.

    Args:
        path: of the file, which is made if it is not there.
        identity: [64] hexadecimal digits, of the blocks.
        slot_bytes: of the largest block.
        num_bytes: of all slots, if the file is made.
        private: whether to remove the name of the file, so that no other process finds it.

    Raises CapacityError if the memory cannot be had, and ConfigError for a file that is no store of these blocks.
    """

    def __init__(self, path: Path, identity: str, slot_bytes: int, num_bytes: int, *, private: bool = False) -> None:
        size = -(-slot_bytes // 64) * 64
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self._locked(60.0):
                if not os.fstat(self._handle).st_size:
                    self._make(path, identity, size, max(1, num_bytes // size))
                count = self._check(path, identity, size)
            total = HEADER_BYTES + count * (_ENTRY.itemsize + size)
            self._map = mmap.mmap(self._handle, total)
        except BaseException:
            os.close(self._handle)
            raise
        if private:
            path.unlink()
        self.entries: npt.NDArray[Any] = np.frombuffer(self._map, _ENTRY, count, HEADER_BYTES)
        data = np.frombuffer(self._map, np.uint8, count * size, HEADER_BYTES + count * _ENTRY.itemsize)
        self.slots: Bytes = data.reshape(count, size)
        self._sets = max(1, count // WAYS)
        self._ways = count // self._sets
        self.count = count

    def __del__(self) -> None:
        if hasattr(self, "_map"):
            os.close(self._handle)

    def held(self, keys: Sequence[Key]) -> list[bool]:
        """Return for each key whether its block is there."""
        if not keys:
            return []
        tags = np.array([_tag(_digest(key)) for key in keys], np.uint64)
        places = self._places(tags)
        entries = self.entries[places]
        found: list[bool] = ((entries["tag"] == tags[:, None]) & (entries["state"] == VALID)).any(1).tolist()
        return found

    def used(self, keys: Sequence[Key]) -> None:
        """Note the time of a use, without the lock: the worst is that a block goes too early."""
        for key in keys:
            if (index := self._find(_digest(key))) is not None:
                self.entries["used"][index] = time.monotonic_ns()

    def reserve(self, keys: Sequence[Key], busy: Collection[Key]) -> tuple[list[Slot | None], int]:
        """Return a slot for each block, None for one without room or that is being written, and how many were evicted.

        Raises:
            LockedError: if another process holds the lock.
        """
        kept = {_digest(key) for key in busy}
        found, evicted = list[Slot | None](), 0
        with self._locked(LOCK_SECONDS):
            for key in keys:
                digest = _digest(key)
                index = self._choose(digest, kept)
                if index is not None:
                    evicted += int(self.entries["state"][index] == VALID)
                    self._give(index, digest)
                found.append(None if index is None else Slot(index, int(self.entries["generation"][index]), digest))
        return found, evicted

    def write(self, slot: Slot, data: Bytes) -> bool:
        """Write a block into its slot. Return False if the slot has another owner by now."""
        if int(self.entries["generation"][slot.index]) != slot.generation:
            return False
        self.slots[slot.index, : len(data)] = data
        checksum = zlib.crc32(data.data, zlib.crc32(slot.digest))
        with self._locked(STALE_SECONDS):
            entry = self.entries[slot.index]
            if int(entry["generation"]) != slot.generation:
                return False
            self._set(slot.index, length=len(data), checksum=checksum, used=time.monotonic_ns(), state=VALID)
        return True

    def read(self, key: Key, data: Bytes) -> Fault | None:
        """Copy a block. Return what is wrong with it, None for nothing."""
        digest = _digest(key)
        index = self._find(digest)
        if index is None:
            return Fault.MISSING
        before = self.entries[index].copy()
        data[:] = self.slots[index, : len(data)]
        after = self.entries[index].copy()
        if before != after and int(before["generation"]) != int(after["generation"]):
            return Fault.MISSING
        good = zlib.crc32(data.data, zlib.crc32(digest)) == int(before["checksum"])
        if good and int(before["length"]) == len(data) and int(after["state"]) == VALID:
            return None
        with self._locked(1.0):
            if int(self.entries["generation"][index]) == int(before["generation"]):
                self._set(index, state=FREE)
        return Fault.CORRUPT

    def _choose(self, digest: bytes, kept: Collection[bytes]) -> int | None:
        """Return the slot that a new block gets, None if there is none for it."""
        places = self._places(np.array([_tag(digest)], np.uint64))[0]
        entries = self.entries[places]
        writing = entries["state"] == WRITING
        mine = (entries["key"] == _words(digest)).all(1)
        stale = np.array([w and _is_stale(e) for w, e in zip(writing, entries, strict=True)])
        if (mine & ((writing & ~stale) | (entries["state"] == VALID))).any():
            return None
        protected = np.array([one["key"].tobytes() in kept for one in entries])
        usable = (~writing & ~protected) | stale
        if not usable.any():
            return None
        age = np.where(entries["state"] == VALID, entries["used"], np.int64(-1))
        return int(places[np.where(usable, age, np.iinfo(np.int64).max).argmin()])

    def _give(self, index: int, digest: bytes) -> None:
        generation = int(self.entries["generation"][index]) + 1
        self._set(index, state=WRITING, generation=generation, tag=_tag(digest), key=_words(digest))
        self._set(index, owner=os.getpid(), since=time.time())

    def _set(self, index: int, **values: Any) -> None:
        for name, value in values.items():
            self.entries[name][index] = value

    def _find(self, digest: bytes) -> int | None:
        """Return the slot of a block, None if it is not there."""
        places = self._places(np.array([_tag(digest)], np.uint64))[0]
        entries = self.entries[places]
        found = np.flatnonzero((entries["key"] == _words(digest)).all(1) & (entries["state"] == VALID))
        return int(places[found[0]]) if len(found) else None

    def _places(self, tags: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the slots in which blocks may lie, [n, ways]."""
        first = (tags % np.uint64(self._sets)).astype(np.int64) * self._ways
        return first[:, None] + np.arange(self._ways)

    @contextmanager
    def _locked(self, seconds: float) -> Iterator[None]:
        """Hold the lock.

        Each call opens the file anew, since the lock belongs to the open file: threads exclude each other too.

        Raises:
            LockedError: if it is not free after `seconds`.
        """
        handle = os.open(f"/proc/self/fd/{self._handle}", os.O_RDWR | os.O_CLOEXEC)
        try:
            latest = time.monotonic() + seconds
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > latest:
                        raise LockedError(f"the lock of a shared store is not free after {seconds:g} s") from None
                    time.sleep(0.0002)
            yield
        finally:
            os.close(handle)  # which releases it

    def _make(self, path: Path, identity: str, size: int, count: int) -> None:
        """Reserve the memory, then write the header."""
        total = HEADER_BYTES + count * (_ENTRY.itemsize + size)
        try:
            os.posix_fallocate(self._handle, 0, total)
        except OSError as error:
            os.ftruncate(self._handle, 0)
            with suppress(FileNotFoundError):
                path.unlink()
            raise CapacityError(
                f"kv_connector.shared.memory: {total} bytes cannot be had in {str(path.parent)!r}: {error}",
                fix="lower it, or remove stores there that nobody uses",
            ) from error
        os.pwrite(self._handle, _HEADER.pack(MAGIC, VERSION, os.getpid(), size, count, identity.encode()), 0)

    def _check(self, path: Path, identity: str, size: int) -> int:
        """Return the number of slots of a file.

        Raises:
            ConfigError: if it is no store of these blocks.
        """
        header = os.pread(self._handle, _HEADER.size, 0)
        facts = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0, 0, 0, 0, b"")
        magic, version, _, there, count, owner = facts
        total = HEADER_BYTES + count * (_ENTRY.itemsize + size)
        wanted = (MAGIC, VERSION, size, identity.encode())
        if (magic, version, there, owner) != wanted or not count or os.fstat(self._handle).st_size != total:
            raise ConfigError(
                f"kv_connector.shared: {str(path)!r} is no store of these blocks", fix="remove the file, or set `name`"
            )
        return int(count)


def _digest(key: Key) -> bytes:
    return hashlib.sha256(struct.pack("<Q", key.group) + key.block_hash).digest()


def _tag(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def _words(digest: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(digest, "<u8")


def _is_stale(entry: Any) -> bool:
    """Return whether nobody is writing a block any more that was to be written."""
    if time.time() - float(entry["since"]) > STALE_SECONDS:
        return True
    try:
        os.kill(int(entry["owner"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
