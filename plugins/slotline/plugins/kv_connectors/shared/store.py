"""Store of blocks in memory that several processes share, and who removes it."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from attrs import frozen

from slotline.plugins.kv_connectors.shared.table import VERSION, LockedError, SharedTable, Slot
from slotline.plugins.kv_connectors.stores.block_store import Bytes, Counts, Fault, Key
from slotline.plugins.kv_connectors.stores.codecs import codec_of, identity_of
from slotline.plugins.kv_connectors.stores.staged import StagedConnector
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts import KVConnectorContext
from slotline.registry.errors import CapacityError, ConfigError


def build_shared(context: KVConnectorContext) -> StagedConnector:
    """Build the connector.

    Raises:
        CapacityError: if the memory does not hold one block, or cannot be had.
        ConfigError: if the folder cannot be used, or the codec does not know the caches.
    """
    options, counts = context.options, Counts("kv_connector:shared")
    codec = codec_of(options.codec, context, "kv_connector.shared.codec")
    identity, size = identity_of(options.codec, context), max(codec.sizes)
    if size_in_bytes(options.memory) < size:
        raise CapacityError(
            f"kv_connector.shared.memory = {options.memory!r} holds no block: one takes {size} bytes",
            fix=f"set it to '{-(-size // 1024)}KiB' at least",
        )
    try:
        store = SharedStore(options.folder, options.name, identity, size, options.memory, counts)
    except OSError as error:
        raise ConfigError(
            f"kv_connector.shared.folder = {options.folder!r} cannot be used: {error}",
            fix="name a folder that can be written, of a file system in memory",
        ) from error
    what = "kv_connector.shared.staging"
    return StagedConnector(context, store, codec, counts, options.staging, options.threads, what)


@frozen
class Ticket:
    """Slot of a table."""

    table: SharedTable
    slot: Slot


class SharedStore:
    """Implements `BlockStore`.

    Args:
        folder, name: place of the file.
        identity: of the blocks.
        size: bytes of the largest block.
        memory: as in the configuration.
        counts: what happened.
    """

    def __init__(self, folder: str, name: str, identity: str, size: int, memory: str, counts: Counts) -> None:
        self._folder, self._identity, self._size, self._counts = Path(folder), identity, size, counts
        self._memory = size_in_bytes(memory)
        path = self._folder / f"slotline-kv-v{VERSION}-{name}-{identity[:32]}"
        users = _join(path)
        self._table: SharedTable | None = SharedTable(path, identity, size, self._memory)
        self.close = weakref.finalize(self, _leave, path, users)

    def held(self, keys: Sequence[Key]) -> list[bool]:
        return [False] * len(keys) if self._table is None else self._table.held(keys)

    def used(self, keys: Sequence[Key]) -> None:
        if self._table is not None:
            self._table.used(keys)

    def reserve(self, keys: Sequence[Key], busy: Collection[Key]) -> list[Ticket | None]:
        if self._table is None or not keys:
            return [None] * len(keys)
        try:
            slots, evicted = self._table.reserve(keys, busy)
        except LockedError:
            self._counts.add("skipped_locked", len(keys))
            return [None] * len(keys)
        self._counts.add("evicted", evicted)
        self._counts.add("skipped_room", slots.count(None))
        return [None if slot is None else Ticket(self._table, slot) for slot in slots]

    def write(self, ticket: Ticket, data: Bytes) -> bool:
        return ticket.table.write(ticket.slot, data)

    def settle(self, ticket: Ticket, *, written: bool) -> None:
        """Do nothing, because the table has it."""

    def read(self, key: Key, data: Bytes) -> Fault | None:
        table = self._table
        fault = Fault.MISSING if table is None else table.read(key, data)
        if fault is Fault.CORRUPT:
            self._counts.fault(fault.value, "a block has a wrong checksum: it counts as not held")
        elif fault is not None:
            self._counts.add(fault.value)
        return fault

    def lost(self, key: Key) -> None:
        """Do nothing, because the table does not have it any more."""

    def refresh(self) -> None:
        """Do nothing, because the table is what all processes see."""

    def reset(self) -> None:
        """Keep later blocks in memory of one's own, because other processes may still have the old weights."""
        path = self._folder / f"slotline-kv-v{VERSION}-{uuid4().hex}"
        self._table = None
        try:
            self._table = SharedTable(path, self._identity, self._size, self._memory, private=True)
        except CapacityError as error:
            self._counts.fault("no_memory", "nothing is kept any more: %s", error.message)


def _join(path: Path) -> int:
    """Return a handle whose lock says that the store has a user, until the process closes it or dies."""
    while True:
        handle = os.open(f"{path}.users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == os.stat(f"{path}.users").st_ino:
                return handle
        os.close(handle)  # its last user has just removed it


def _leave(path: Path, users: int) -> None:
    """Remove a store without other users."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        for one in (path, Path(f"{path}.users")):
            with suppress(FileNotFoundError):
                one.unlink()
    os.close(users)
