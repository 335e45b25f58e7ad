"""Reading of large files into the system's page cache at the disk's speed, before they are mapped and used.

A mapped file is read where it is touched, in small pieces and in the order of use, several times slower than the disk.
Pages that are cached already cost nothing here. `benchmarks/load_weights.py` has the figures.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil

THREADS = 4
BLOCK = 32 << 20
"""Bytes that a thread asks for at a time; a multiple of the page size."""

_POPULATE_READ = 22
"""Linux's MADV_POPULATE_READ, from 5.14 on."""

Block = tuple[int, int, int]
"""File descriptor, offset and number of bytes."""


def read_ahead(files: Iterable[Path], *, progress: bool, label: str = "reading weights") -> int:
    """Read files into the page cache with several threads, unless memory has no room for them.

    A file that cannot be read is left out: those who use it say what is wrong.

    Args:
        progress: show a bar on standard error if it is a terminal.
        label: of the bar.

    Returns:
        The number of bytes of the files, 0 if they were not read.
    """
    sizes = {file: os.path.getsize(file) for file in dict.fromkeys(files) if os.path.isfile(file)}
    total = sum(sizes.values())
    if not total or total > psutil.virtual_memory().available:
        return 0
    with _opened(sizes) as blocks, _bar(total, label, show=progress) as advance, ThreadPoolExecutor(THREADS) as pool:
        for count in pool.map(_read, blocks):
            advance(count)
    return total


@contextmanager
def _opened(sizes: dict[Path, int]) -> Iterator[list[Block]]:
    """Open files and return their blocks in order."""
    blocks: list[Block] = []
    descriptors = []
    try:
        for file, size in sizes.items():
            try:
                descriptors.append(os.open(file, os.O_RDONLY))
            except OSError:
                continue
            blocks += [(descriptors[-1], start, min(BLOCK, size - start)) for start in range(0, size, BLOCK)]
        yield blocks
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read(block: Block) -> int:
    """Bring a block into the page cache, and return its size."""
    descriptor, start, size = block
    try:
        if not _populated(descriptor, start, size):
            os.preadv(descriptor, [bytearray(size)], start)
    except (OSError, ValueError):
        pass  # said by those who use the file
    return size


def _populated(descriptor: int, start: int, size: int) -> bool:
    """Let the system read a block without a copy. Return False where it cannot."""
    if sys.platform != "linux":
        return False
    mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=start)
    address = ctypes.c_char.from_buffer(mapped)
    try:
        madvise = ctypes.CDLL(None).madvise  # mmap's own method holds the interpreter's lock while it reads
        return bool(madvise(ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(size), _POPULATE_READ) == 0)
    finally:
        del address
        mapped.close()


@contextmanager
def _bar(total: int, label: str, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar over bytes, on a terminal."""
    if not (show and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as shown:
        task = shown.add_task(label, total=total)
        yield lambda count: shown.advance(task, count)
