"""File of one block: a header of 192 bytes, then the block's bytes. Nothing in it is executed or unpickled.

All numbers are little-endian:

| offset | bytes | content |
|---|---|---|
| 0 | 8 | `SLOTKVB` and a zero |
| 8 | 4 | version of the format |
| 12 | 4 | CRC-32 of all other bytes of the file |
| 16 | 8 | bytes of the block in the file |
| 24 | 8 | number of the cache group |
| 32 | 32 | SHA-256 of the identity of model, rank and form |
| 64 | 32 | SHA-256 of the block's hash |
| 96 | 96 | zeros |
"""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path
from threading import get_ident
from typing import Protocol

from slotline.plugins.kv_connectors.disk import file_reader
from slotline.plugins.kv_connectors.disk.file_reader import HEADER, HEADER_BYTES, MAGIC, VERSION, read_into
from slotline.plugins.kv_connectors.stores.block_store import Bytes, Fault, Key


class Transport(Protocol):
    """What moves the bytes of open files. Any thread may call it, with a file of its own."""

    def put(self, handle: int, header: bytes, data: Bytes) -> None:
        """Write a header and a block. Raises OSError if they cannot be written."""
        ...

    def get(self, handle: int, header: bytearray, data: Bytes) -> tuple[int, int]:
        """Read a header and a block. Return how many bytes were read, and the size of the file.

        Raises:
            OSError: if they cannot be read.
        """
        ...


class SystemCalls(Transport):
    """Vectored reads and writes of the system."""

    def put(self, handle: int, header: bytes, data: Bytes) -> None:
        left = [memoryview(header), data.data]
        while left:
            count = os.writev(handle, left)
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]

    def get(self, handle: int, header: bytearray, data: Bytes) -> tuple[int, int]:
        size = os.fstat(handle).st_size
        return read_into(handle, header, data.data, size), size


SYSTEM_CALLS = SystemCalls()
"""The transport of `disk`."""


def header_of(key: Key, identity: str, data: Bytes) -> bytes:
    """Return the header of a block's file."""

    def packed(checksum: int) -> bytes:
        return HEADER.pack(MAGIC, VERSION, checksum, len(data), *named(key, identity))

    return packed(zlib.crc32(data.data, zlib.crc32(packed(0))))


def write_block(
    path: Path, key: Key, identity: str, data: Bytes, *, fsync: bool, transport: Transport = SYSTEM_CALLS
) -> None:
    """Write a file under another name and rename it, so that nobody finds a part of it.

    Args:
        fsync: whether the disk must have the bytes before the file gets its name.
        transport: moves the bytes.

    Raises:
        OSError: if the file cannot be written, for instance since the disk is full. Nothing is left of it then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}.tmp")
    try:
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            transport.put(handle, header_of(key, identity, data), data)
            if fsync:
                os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_block(
    path: Path, key: Key, identity: str, data: Bytes, *, transport: Transport = SYSTEM_CALLS
) -> Fault | None:
    """Read a file into `data`, [block_bytes]. Return what is wrong with the file, None for nothing.

    Raises:
        OSError: if the disk cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Fault.MISSING
    try:
        header = bytearray(HEADER_BYTES)
        got, size = transport.get(handle, header, data)
    finally:
        os.close(handle)
    return fault_of(bytes(header), got, size, key, identity, data)


def named(key: Key, identity: str) -> tuple[int, bytes, bytes]:
    """Return what a block's file must say: cache group, SHA-256 of the identity and of the block's hash."""
    return key.group, _sha(identity.encode()), _sha(key.block_hash)


def fault_of(header: bytes, got: int, size: int, key: Key, identity: str, data: Bytes) -> Fault | None:
    """Return what is wrong with a file of `size` bytes, of which `got` were read."""
    fault = file_reader.fault_of(header, got, size, named(key, identity), data.data)
    return Fault(fault) if fault else None


def _sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
