"""Store of blocks in files of a folder. The engine's thread keeps the list of them, other threads touch the disk.

    FOLDER/v1/IDENTITY/GROUP-HASH

The list is read when the store is built, and again from time to time: another process may use the folder too. The size
limit is for all files in the folder, of all models, ranks and processes.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from uuid import uuid4

from attrs import frozen

from slotline.plugins.kv_connectors.disk.block_file import SYSTEM_CALLS, Transport, read_block, write_block
from slotline.plugins.kv_connectors.disk.file_reader import HEADER_BYTES, VERSION, note_use
from slotline.plugins.kv_connectors.disk.read_processes import ReadProcesses
from slotline.plugins.kv_connectors.stores.background import Background
from slotline.plugins.kv_connectors.stores.block_store import Bytes, Counts, Fault, Key
from slotline.plugins.kv_connectors.stores.codecs import codec_of, identity_of
from slotline.plugins.kv_connectors.stores.staged import StagedConnector
from slotline.registry.cache_folder import cache_folder
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts import KVConnectorContext
from slotline.registry.errors import CapacityError, ConfigError

SCAN_SECONDS = 10.0
"""Time between two looks at the folder."""
FULL_SECONDS = 30.0
"""Time without saves after the disk was full."""
OLD_SECONDS = 3600.0
"""Age at which unfinished files of any process are removed."""
_NAME = re.compile(r"\d+-[0-9a-f]*")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def build_disk(context: KVConnectorContext) -> StagedConnector:
    """Build the connector.

    Raises:
        CapacityError: if the size does not hold one block.
        ConfigError: if the folder cannot be used, or the codec does not know the caches.
    """
    processes = context.options.readers == "processes" and hasattr(os, "memfd_create")
    return build_files(context, "kv_connector.disk", SYSTEM_CALLS, processes=processes)


def build_files(
    context: KVConnectorContext, table: str, transport: Transport, *, processes: bool = False
) -> StagedConnector:
    """Build a connector whose blocks are files.

    Args:
        context: of the connector.
        table: of its options, which are those of `FileOptions` at least.
        transport: moves the bytes of files.
        processes: whether processes read files, where the codec keeps the bytes of blocks.

    Raises:
        CapacityError: if the size does not hold one block.
        ConfigError: if the folder cannot be used, or the codec does not know the caches.
    """
    options, counts = context.options, Counts(table.replace(".", ":"))
    codec = codec_of(options.codec, context, f"{table}.codec")
    store = DiskStore(
        options.folder,
        identity_of(options.codec, context),
        codec.sizes,
        options.size,
        counts,
        fsync=options.fsync == "file",
        transport=transport,
        table=table,
    )
    readers = None
    if processes and codec.sizes == [group.block_bytes for group in context.groups]:
        readers = partial(ReadProcesses, store, counts=counts)
    what = f"{table}.staging"
    return StagedConnector(context, store, codec, counts, options.staging, options.threads, what, readers)


@frozen
class Ticket:
    """File to be written, and the files that make way for it."""

    key: Key
    name: str
    identity: str
    gone: tuple[str, ...]


class DiskStore:
    """Implements `BlockStore`.

    Args:
        folder: of all models, empty for one in the cache folder.
        identity: of the blocks of this model and rank.
        sizes: bytes of a block, by group.
        limit: size of all files, as in the configuration.
        counts: what happened.
        fsync: see `write_block`.
        transport: moves the bytes.
        table: of the options, for errors.

    Attributes:
        root: folder of all models' files.
        identity: of the blocks, another one after a reset.
    """

    def __init__(
        self,
        folder: str,
        identity: str,
        sizes: Sequence[int],
        limit: str,
        counts: Counts,
        *,
        fsync: bool = False,
        transport: Transport = SYSTEM_CALLS,
        table: str = "kv_connector.disk",
    ) -> None:
        self.identity = identity
        self._sizes = [HEADER_BYTES + size for size in sizes]
        self._limit, self._counts = size_in_bytes(limit), counts
        self._fsync, self._transport = fsync, transport
        if self._limit < max(self._sizes):
            raise CapacityError(
                f"{table}.size = {limit!r} holds no block: one takes {max(self._sizes)} bytes",
                fix=f"set it to '{-(-max(self._sizes) // 1024)}KiB' at least",
            )
        try:
            place = Path(folder) if folder else cache_folder() / "kv-blocks"
            self.root = place / f"v{VERSION}"
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.root / identity).mkdir(mode=0o700, exist_ok=True)
            found = _scan(self.root)
        except OSError as error:
            raise ConfigError(
                f"{table}.folder = {folder!r} cannot be used: {error}",
                fix="name a folder that can be written",
            ) from error
        self._files: OrderedDict[str, int] = OrderedDict(found)  # sizes by name, the least recently used first
        self._total = sum(self._files.values())
        self._writing: dict[str, int] = {}  # sizes by name
        self._recent: set[str] = set()  # written since the last look began
        self._dropped: set[str] = set()  # dropped since then
        self._scans = Background({"scan": 1})
        self._next_scan = time.monotonic() + SCAN_SECONDS
        self._full_until = 0.0

    def held(self, keys: Sequence[Key]) -> list[bool]:
        return [self.name(key) in self._files for key in keys]

    def used(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if (name := self.name(key)) in self._files:
                self._files.move_to_end(name)

    def reserve(self, keys: Sequence[Key], busy: Collection[Key]) -> list[Ticket | None]:
        if time.monotonic() < self._full_until:
            self._counts.add("skipped_full", len(keys))
            return [None] * len(keys)
        kept = {self.name(key) for key in busy}
        return [self._reserve(key, kept) for key in keys]

    def write(self, ticket: Ticket, data: Bytes) -> bool:
        for name in ticket.gone:
            (self.root / name).unlink(missing_ok=True)
        path = self.root / ticket.name
        try:
            try:
                self._write(path, ticket, data)
            except FileNotFoundError:  # somebody has removed the folder
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._write(path, ticket, data)
        except OSError as error:
            if error.errno in _FULL:
                self._full_until = time.monotonic() + FULL_SECONDS
                text = "the disk is full, nothing is saved for %g s: %s"
                self._counts.fault("disk_full", text, FULL_SECONDS, error)
                return False
            raise
        return True

    def settle(self, ticket: Ticket, *, written: bool) -> None:
        size = self._writing.pop(ticket.name, 0)
        if written:
            self._files[ticket.name] = size
            self._recent.add(ticket.name)
        else:
            self._total -= size

    def read(self, key: Key, data: Bytes) -> Fault | None:
        name = self.name(key)
        path = self.root / name
        fault = read_block(path, key, self.identity, data, transport=self._transport)
        if fault is None:
            note_use(str(path), path.stat().st_mtime)
        else:
            self.found_fault(name, fault)
        return fault

    def found_fault(self, name: str, fault: Fault) -> None:
        """Remove a file that is no good. Any thread may call it."""
        path = self.root / name
        text = "%s is no good (%s): it counts as not held, and is removed"
        self._counts.fault(fault.value, text, path, fault.value)
        path.unlink(missing_ok=True)

    def name(self, key: Key) -> str:
        """Return the place of a block's file in the folder of all models."""
        return f"{self.identity}/{key.group}-{key.block_hash.hex()}"

    def lost(self, key: Key) -> None:
        self._drop(self.name(key))

    def refresh(self) -> None:
        self._scans.poll()
        if time.monotonic() >= self._next_scan:
            self._next_scan = float("inf")
            self._recent.clear()
            self._dropped.clear()
            self._scans.submit("scan", lambda: _scan(self.root), self._compare)

    def reset(self) -> None:
        """Keep later blocks in a folder of their own, because other processes may still have the old weights."""
        self.identity = f"{self.identity[:64]}-{uuid4().hex}"

    def _write(self, path: Path, ticket: Ticket, data: Bytes) -> None:
        write_block(path, ticket.key, ticket.identity, data, fsync=self._fsync, transport=self._transport)

    def _reserve(self, key: Key, kept: Collection[str]) -> Ticket | None:
        """Return the ticket of a block, None if there is no room for it."""
        name, size, gone = self.name(key), self._sizes[key.group], list[str]()
        if name in self._writing:  # of before a reset
            return None
        while self._total + size > self._limit:
            victim = next((one for one in self._files if one not in kept), None)
            if victim is None:
                self._counts.add("skipped_room")
                return None
            self._drop(victim)
            gone.append(victim)
        self._counts.add("evicted", len(gone))
        self._writing[name] = size
        self._total += size
        return Ticket(key, name, self.identity, tuple(gone))

    def _drop(self, name: str) -> None:
        self._total -= self._files.pop(name, 0)
        self._dropped.add(name)

    def _compare(self, found: list[tuple[str, int]] | Exception) -> None:
        """Compare the list of files with what was found in the folder."""
        self._next_scan = time.monotonic() + SCAN_SECONDS
        if isinstance(found, Exception):
            self._counts.fault("scan_errors", "the folder cannot be read: %s", found)
            return
        there = dict(found)
        for name in [one for one in self._files if one not in there and one not in self._recent]:
            self._total -= self._files.pop(name)
        for name, size in found:
            if name not in self._files and name not in self._writing and name not in self._dropped:
                self._files[name] = size
                self._total += size


def _scan(root: Path) -> list[tuple[str, int]]:
    """Return the name and size of each file, the least recently used first. Remove what dead processes left."""
    found = list[tuple[float, str, int]]()
    with os.scandir(root) as owners:
        for owner in [one for one in owners if one.is_dir(follow_symlinks=False)]:
            found += _files(owner.path, owner.name)
    return [(name, size) for _, name, size in sorted(found)]


def _files(path: str, identity: str) -> Iterator[tuple[float, str, int]]:
    """Yield time of last use, name and size of each file of a folder."""
    with os.scandir(path) as files:
        for file in files:
            try:
                facts = file.stat(follow_symlinks=False)
                if _NAME.fullmatch(file.name):
                    yield facts.st_mtime, f"{identity}/{file.name}", facts.st_size
                elif file.name.endswith(".tmp") and _is_left(file.name, facts.st_mtime):
                    os.unlink(file.path)
            except FileNotFoundError:
                continue


def _is_left(name: str, written: float) -> bool:
    """Return whether no process can be writing an unfinished file any more."""
    process = name.split(".")[-3] if name.count(".") > 2 else ""
    if time.time() - written > OLD_SECONDS or not process.isdecimal():
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
