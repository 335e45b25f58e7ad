"""Store of blocks in memory that several processes share, and who removes it."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from uuid import uuid4

from attrs import frozen

from slotline.plugins.kv_connectors.shared.table import VERSION, LockedError, SharedTable, Slot
from slotline.plugins.kv_connectors.stores.block_store import Bytes, Counts, Fault, Key
from slotline.plugins.kv_connectors.stores.codecs import codec_of, identity_of
from slotline.plugins.kv_connectors.stores.size_classes import class_of, size_classes
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
    identity, classes = identity_of(options.codec, context), size_classes(context.groups)
    sizes = [max(codec.sizes[group] for group in own) for own in classes]
    if size_in_bytes(options.memory) // len(sizes) < max(sizes):
        what = "block" if len(sizes) == 1 else "state in the half that is for states"
        raise CapacityError(
            f"kv_connector.shared.memory = {options.memory!r} holds no {what}: one takes {max(sizes)} bytes",
            fix=f"set it to '{-(-max(sizes) * len(sizes) // 1024)}KiB' at least",
        )
    try:
        store = SharedStore(options.folder, options.name, identity, sizes, options.memory, counts, class_of(classes))
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
        sizes: bytes of the largest block of each class. Each class has a table, with the same share of the memory.
        memory: as in the configuration.
        counts: what happened.
        classes: number of the class of each group, empty if there is one.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        identity: str,
        sizes: Sequence[int],
        memory: str,
        counts: Counts,
        classes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._folder, self._identity, self._sizes, self._counts = Path(folder), identity, sizes, counts
        self._memory, self._classes = size_in_bytes(memory) // len(sizes), classes
        path = self._folder / f"slotline-kv-v{VERSION}-{name}-{identity[:32]}"
        users, paths = _join(path), [path, path.with_name(f"{path.name}.states")]
        self.close = weakref.finalize(self, _leave, path, paths[: len(sizes)], users)
        try:
            self.tables = self._open(paths)
        except BaseException:
            self.close()
            raise

    def _open(self, paths: Sequence[Path], *, private: bool = False) -> list[SharedTable]:
        pairs = zip(paths, self._sizes, strict=False)
        return [SharedTable(path, self._identity, size, self._memory, private=private) for path, size in pairs]

    def held(self, keys: Sequence[Key]) -> list[bool]:
        found = [False] * len(keys)
        for table, places in self._by_table(keys):
            for place, held in zip(places, table.held([keys[place] for place in places]), strict=True):
                found[place] = held
        return found

    def used(self, keys: Sequence[Key]) -> None:
        for table, places in self._by_table(keys):
            table.used([keys[place] for place in places])

    def reserve(self, keys: Sequence[Key], busy: Collection[Key]) -> list[Ticket | None]:
        found: list[Ticket | None] = [None] * len(keys)
        for table, places in self._by_table(keys):
            try:
                slots, evicted = table.reserve([keys[place] for place in places], busy)
            except LockedError:
                self._counts.add("skipped_locked", len(places))
                continue
            self._counts.add("evicted", evicted)
            self._counts.add("skipped_room", slots.count(None))
            for place, slot in zip(places, slots, strict=True):
                found[place] = None if slot is None else Ticket(table, slot)
        return found

    def write(self, ticket: Ticket, data: Bytes) -> bool:
        return ticket.table.write(ticket.slot, data)

    def settle(self, ticket: Ticket, *, written: bool) -> None:
        """Do nothing, because the table has it."""

    def read(self, key: Key, data: Bytes) -> Fault | None:
        found = self._by_table([key])
        fault = found[0][0].read(key, data) if found else Fault.MISSING
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
        self.tables = []
        try:
            self.tables = self._open(
                [self._folder / f"slotline-kv-v{VERSION}-{uuid4().hex}" for _ in self._sizes], private=True
            )
        except CapacityError as error:
            self._counts.fault("no_memory", "nothing is kept any more: %s", error.message)

    def _by_table(self, keys: Sequence[Key]) -> list[tuple[SharedTable, list[int]]]:
        """Return the tables of some blocks, each with the places of its own."""
        places = [[] for _ in self.tables]  # type: list[list[int]]
        for place, key in enumerate(keys if self.tables else ()):
            places[self._classes.get(key.group, 0)].append(place)
        return [(table, own) for table, own in zip(self.tables, places, strict=True) if own]


def _join(path: Path) -> int:
    """Return a handle whose lock says that the store has a user, until the process closes it or dies."""
    while True:
        handle = os.open(f"{path}.users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == os.stat(f"{path}.users").st_ino:
                return handle
        os.close(handle)  # its last user has just removed it


def _leave(path: Path, tables: Sequence[Path], users: int) -> None:
    """Remove a store without other users."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        for one in (*tables, Path(f"{path}.users")):
            with suppress(FileNotFoundError):
                one.unlink()
    os.close(users)
