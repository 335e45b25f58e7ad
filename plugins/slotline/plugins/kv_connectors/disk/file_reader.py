"""What is wrong with a block's file, and a program that reads such files into shared memory in a process of its own.

A thread that reads small files takes the interpreter's lock some ten times a file, and the steps wait for it each time.
This program has a lock of its own, and a niceness, so that it takes what the steps leave of the processors. It is run
by its path, without packages, and starts in some hundredths of a second:

    python -E -s -S file_reader.py FOLDER MEMORY NICENESS

MEMORY is the handle of the memory. Jobs come on the standard input, and results go to the standard output, both as
packed numbers. The system is told of a few megabytes of files before they are read, so that the disk has always
something to do. The program ends with its input.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import struct
import sys
import time
import zlib
from collections import deque

VERSION = 1
MAGIC = b"SLOTKVB\0"
HEADER = struct.Struct("<8sIIQQ32s32s96x")
HEADER_BYTES = HEADER.size
USED_SECONDS = 60.0
"""Age of a file's time of last use from which on a use is noted in the file. Each note is a write."""
JOB = struct.Struct("<QQQQ32s32sH")
"""A job: its number, the place and size of the block in the memory, and what its file must say: cache group, SHA-256 of
the identity and of the hash. The length of the file's name follows, and the name."""
RESULT = struct.Struct("<QHH")
"""A result: the job's number, the index in `FAULTS` of what is wrong, 0 for nothing, and the system's number of it."""
FAULTS = ("", "missing", "truncated", "foreign", "other_version", "corrupt", "unreadable")
AHEAD_BYTES = 4 * 2**20
"""Bytes of files that the disk is asked for before they are read."""
TOLD_BYTES = 2**20
"""Bytes of blocks after which their results are told at the latest."""

_Job = tuple[int, int, int, tuple[int, bytes, bytes], str]


def fault_of(header: bytes, got: int, size: int, named: tuple[int, bytes, bytes], data: memoryview) -> str:
    """Return what is wrong with a file of `size` bytes, of which `got` were read. Empty for nothing.

    Args:
        header: its first bytes.
        named: what it must say: cache group, SHA-256 of the identity and of the block's hash.
        data: the block that was read.
    """
    if got < HEADER_BYTES:
        return "truncated"
    magic, version, checksum, length, group, owner, name = HEADER.unpack(header)
    if magic != MAGIC:
        return "foreign"
    if version != VERSION:
        return "other_version"
    if ((group, owner, name), length) != (named, len(data)):
        return "foreign"
    if size < HEADER_BYTES + len(data):
        return "truncated"
    blank = header[:12] + bytes(4) + header[16:]
    return "corrupt" if size != got or zlib.crc32(data, zlib.crc32(blank)) != checksum else ""


def read_into(handle: int, header: bytearray, data: memoryview, size: int) -> int:
    """Read a header and a block from a file of `size` bytes. Return how many bytes were read."""
    got = os.preadv(handle, [header, data], 0)
    while HEADER_BYTES <= got < min(size, HEADER_BYTES + len(data)):
        more = os.preadv(handle, [data[got - HEADER_BYTES :]], got)
        if not more:
            break
        got += more
    return got


def note_use(path: str | int, modified: float) -> None:
    """Note in a file that it is of use, unless that was done lately."""
    if time.time() - modified > USED_SECONDS:
        os.utime(path)


class Reader:
    """Files that the disk was asked for, in order.

    Args:
        folder: of the files.
        memory: into which blocks are read.
    """

    def __init__(self, folder: str, memory: memoryview) -> None:
        self._folder, self._memory = folder, memory
        self._jobs: deque[_Job] = deque()
        self._opened: deque[tuple[_Job, int, OSError | None]] = deque()  # each with its handle
        self._ahead = 0  # bytes of them
        self._came = b""  # the beginning of a job

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to do."""
        return not self._jobs and not self._opened

    def take(self, data: bytes) -> None:
        """Take jobs, which may be cut anywhere."""
        data, at = self._came + data, 0
        while len(data) - at >= JOB.size:
            number, place, size, group, owner, name, length = JOB.unpack_from(data, at)
            end = at + JOB.size + length
            if len(data) < end:
                break
            self._jobs.append((number, place, size, (group, owner, name), os.fsdecode(data[at + JOB.size : end])))
            at = end
        self._came = data[at:]

    def next(self) -> tuple[bytes, int]:
        """Read a file. Return its result, and the bytes of its block."""
        while self._jobs and (not self._opened or self._ahead < AHEAD_BYTES):
            self._open(self._jobs.popleft())
        (number, place, size, named, _), handle, error = self._opened.popleft()
        self._ahead -= size
        fault = "unreadable"
        try:
            if error is not None:
                raise error
            fault = self._read(handle, named, self._memory[place : place + size])
        except FileNotFoundError:
            fault, error = "missing", None
        except OSError as found:
            error = found
        finally:
            if handle >= 0:
                os.close(handle)
        return RESULT.pack(number, FAULTS.index(fault), 0 if error is None else error.errno or 0), size

    def _open(self, job: _Job) -> None:
        """Open a file, and have the disk read it."""
        handle, error = -1, None
        try:
            handle = os.open(f"{self._folder}/{job[4]}", os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError as found:
            error = found
        self._opened.append((job, handle, error))
        self._ahead += job[2]

    def _read(self, handle: int, named: tuple[int, bytes, bytes], data: memoryview) -> str:
        """Read an open file. Return what is wrong with it."""
        facts, header = os.fstat(handle), bytearray(HEADER_BYTES)
        got = read_into(handle, header, data, facts.st_size)
        fault = fault_of(bytes(header), got, facts.st_size, named, data)
        if not fault:
            note_use(handle, facts.st_mtime)
        return fault


def main() -> None:
    """Read what is asked for until the input ends."""
    folder, memory, niceness = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    os.nice(int(niceness))
    reader = Reader(folder, memoryview(mmap.mmap(int(memory), 0)))
    results, size = list[bytes](), 0
    while True:
        while reader.is_idle or select.select([0], [], [], 0)[0]:
            data = os.read(0, 2**16)
            if not data:
                return
            reader.take(data)
        result, read = reader.next()
        results.append(result)
        size += read
        if size >= TOLD_BYTES or reader.is_idle:
            os.write(1, b"".join(results))
            results, size = [], 0


if __name__ == "__main__":
    main()
