"""Connector over a store that is slower than memory: steps copy to and from staging rows, and threads do the rest."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, count
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import define, field

from slotline.plugins.kv_connectors.stores.background import Background
from slotline.plugins.kv_connectors.stores.block_store import (
    BlockStore,
    Bytes,
    Counts,
    Fault,
    Key,
    Place,
    Read,
    RowReaders,
)
from slotline.plugins.kv_connectors.stores.codecs import Codec
from slotline.plugins.kv_connectors.stores.copies import Copies, Done, devices_of
from slotline.plugins.kv_connectors.stores.pace import Pace
from slotline.plugins.kv_connectors.stores.rows import Rows, SharedBytes, place_of
from slotline.plugins.kv_connectors.stores.size_classes import size_classes
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts import BlockHash, CacheBlock, KVConnectorContext

_T = TypeVar("_T")
POLL_BYTES = 16 * 2**20
"""Bytes that one poll copies into the caches at most, and that readers are asked for at a time."""
BESIDE_BYTES = 2 * 2**20
"""Bytes that readers are asked for at a time at most while steps run that wait for copies."""
JOB_BYTES = 2**20
"""Bytes that one job of a thread reads at most, unless a block is larger. A job costs more than a small file."""
COPY_SECONDS = 0.0005
"""Time between two looks at whether a row has been copied from a GPU."""
FINISH_SECONDS = 10.0
"""Time after which `finish` gives up loads that do not end. Their bytes reach no cache any more."""


@define(eq=False)
class _Save:
    """Block that is being written, and its row, from which it can be loaded meanwhile."""

    key: Key
    row: torch.Tensor
    ticket: Any
    copied: Done = field(default=lambda: True)


@define(eq=False)
class _Load:
    """Load under way.

    Attributes:
        block: that is loaded.
        begun: when (`perf_counter`).
        row: that it is read into.
        given_up: whether nobody waits for it.
    """

    block: CacheBlock
    begun: float
    row: torch.Tensor | None = None
    given_up: bool = field(default=False)

    @property
    def key(self) -> Key:
        """Return the name of its block in the store."""
        return Key(self.block.group, self.block.block_hash)


@define(eq=False)
class _Staging:
    """Rows of blocks of about the same size.

    Attributes:
        saves, loads: the rows of each.
        size: bytes of a row.
        wanted: loads without a row.
    """

    saves: Rows
    loads: Rows
    size: int
    wanted: deque[_Load] = field(factory=deque)


class StagedConnector:
    """Connector that keeps blocks in a `BlockStore`. Implements `AsyncKVConnector` and `CountingKVConnector`.

    Saved blocks are copied to staging rows in the order of the device's stream, and written by a thread. Without a free
    row a block is not saved. Blocks to be loaded are read by threads. Copies into the caches begin when the engine asks
    what has arrived, so that a read that comes late, or never, writes to no block that has another owner by then. Half
    of the rows' memory is for states, if there are any.

    Args:
        context: of the connector.
        store: of the blocks, in the form of the codec.
        codec: the form.
        counts: what happened, also in the store.
        staging: size of all staging rows, as in the configuration.
        threads: number of threads that read.
        what: key of `staging` in the configuration.
        readers: makes what reads blocks into rows, from the handle of their memory. None if threads read.
    """

    def __init__(
        self,
        context: KVConnectorContext,
        store: BlockStore,
        codec: Codec,
        counts: Counts,
        staging: str,
        threads: int,
        what: str,
        readers: Callable[[int], RowReaders] | None = None,
    ) -> None:
        self._groups, self._store, self._counts = context.groups, store, counts
        self._codec = codec
        devices, classes = devices_of(context), size_classes(context.groups)
        self._copy = Copies(context.copy, devices)
        pinned, what = bool(devices), f"{what} = {staging!r}"
        room, sizes = size_in_bytes(staging) // len(classes), [group.block_bytes for group in context.groups]
        widths = [max(sizes[group] for group in own) for own in classes]
        ends = list(accumulate(max(room // 4, width) for width in widths))
        shared = None if readers is None else SharedBytes(ends[-1], pinned=pinned, what=what)
        self._staging = dict[int, _Staging]()  # by group
        for own, width, end in zip(classes, widths, ends, strict=True):
            memory = None if shared is None else shared.data[end - max(room // 4, width) : end]
            saves = Rows(room * 3 // 4, width, pinned=pinned, what=what)
            loads = Rows(room // 4, width, pinned=pinned, what=what, memory=memory)
            self._staging |= dict.fromkeys(own, _Staging(saves, loads, width))
        self._shared = shared
        self._readers = None if readers is None or shared is None else readers(shared.handle)
        self._asked: dict[int, _Load] = {}  # by number, what readers were asked for
        self._numbers = count()
        self._pace = None if devices else Pace()  # on GPUs copies take place beside the steps
        self._background, self._threads = Background({"write": 1, "read": threads}), threads
        self._pending: dict[Key, _Save] = {}
        self._loads: dict[int, _Load] = {}  # by block, under way or wanted
        self._read: deque[_Load] = deque()  # in their rows
        self._copying: deque[tuple[list[Done], list[_Load]]] = deque()  # on their way from their rows
        self._arrived: set[int] = set()
        self._failed: set[int] = set()

    @property
    def store(self) -> BlockStore:
        """The store."""
        return self._store

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        self._background.poll()
        keys = [Key(group, one) for one in hashes]
        return [here or key in self._pending for key, here in zip(keys, self._store.held(keys), strict=True)]

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        self._background.poll()
        now = perf_counter()
        begun = [_Load(one, now) for one in loads]
        if begun and not self._loads and self._pace is not None:
            self._pace.restart()
        self._loads |= {one.block.block: one for one in begun}
        try:
            self._store.used([one.key for one in reversed(begun)])  # prefixes begin with the first, of most use
            self._save(saves)
            here = [one for one in begun if one.key in self._pending]
            self._to_device([(one, self._pending[one.key].row) for one in here])
            for one in begun:
                if one.key not in self._pending:
                    self._staging[one.block.group].wanted.append(one)
            if self._readers is None:
                self._dispatch()
        except BaseException:  # all loads count as failed then: none may be copied later
            for one in begun:
                one.given_up = True
                self._loads.pop(one.block.block, None)
                self._arrived.discard(one.block.block)
            raise

    def wait(self) -> None:
        """Take note of a forward pass. Blocks to be saved are read in the stream, before it."""
        if self._pace is not None:
            self._pace.launched()

    def arrived(self) -> Collection[int]:
        self._background.poll()
        self._store.refresh()
        if self._pace is None:
            self._go_on(POLL_BYTES)
        else:
            self._pace.begin(next((one.begun for one in self._loads.values()), None))
            if not self._pace.beside:
                self._go_on(POLL_BYTES)
            elif self._pace.is_left:
                self._go_on_beside(self._pace)
            self._pace.end()
        arrived, self._arrived = self._arrived, set()
        return arrived

    def failed(self) -> Collection[int]:
        failed, self._failed = self._failed, set()
        return failed

    def finish(self) -> None:
        latest = time.monotonic() + FINISH_SECONDS
        while self._loads and time.monotonic() < latest:
            self._go_on(None)
            if self._loads:
                self._background.poll(wait=0.0005 if self._copying or self._asked else 0.05)
        for one in list(self._loads.values()):
            one.given_up = True
            self._counts.fault("given_up", "a load has not ended after %g s", FINISH_SECONDS)
            self._fail(one)
        for staging in self._staging.values():
            staging.wanted.clear()

    def reset(self) -> None:
        self._pending.clear()  # their rows come back when they are written
        self._store.reset()

    def counts(self) -> Mapping[str, float]:
        return self._counts.all()

    def flush(self, seconds: float) -> bool:
        """Wait until all saves are written. Return False if they are not after so long."""
        latest = time.monotonic() + seconds
        while self._pending and time.monotonic() < latest:
            self._background.poll(wait=0.05)
        return not self._pending

    def _save(self, saves: Sequence[CacheBlock]) -> None:
        """Copy those of the blocks to rows that the store lacks and has room for, and have them written."""
        named = {Key(one.group, one.block_hash): one for one in saves}
        keys = [key for key in named if key not in self._pending]
        known = dict(zip(keys, self._store.held(keys), strict=True))
        self._store.used([key for key, held in known.items() if held])
        fresh = [key for key, held in known.items() if not held]
        rows = {key: row for key in fresh if (row := self._staging[key.group].saves.take()) is not None}
        if left := len(fresh) - len(rows):
            self._counts.add("skipped_staging", left)
        busy = {one.key for one in self._loads.values()}
        begun = list[_Save]()
        for (key, row), ticket in zip(rows.items(), self._store.reserve(list(rows), busy), strict=True):
            if ticket is None:
                self._staging[key.group].saves.give_back([row])
            else:
                begun.append(_Save(key, row, ticket))
        for index, group in enumerate(self._groups):
            if own := [one for one in begun if one.key.group == index]:
                blocks, cut = [named[one.key].block for one in own], [one.row[: group.block_bytes] for one in own]
                copied = self._copy.begin_to_host(index, blocks, cut)
                for one in own:
                    one.copied = copied
        for one in begun:
            self._pending[one.key] = one
            data = one.row[: self._groups[one.key.group].block_bytes].numpy()
            work = partial(_write, self._store, one, data, self._codec, self._counts)
            self._background.submit("write", work, partial(self._written, one))

    def _written(self, save: _Save, result: Any) -> None:
        """Take the row of a block back that was written or could not be."""
        if isinstance(result, Exception):
            self._counts.fault("write_errors", "a block cannot be written: %s", result)
        written = result is True
        self._store.settle(save.ticket, written=written)
        self._counts.add("saved", int(written))
        if self._pending.get(save.key) is save:
            del self._pending[save.key]
        self._staging[save.key.group].saves.give_back([save.row])

    def _go_on(self, most: int | None) -> None:
        """Go on with all loads: copy `most` bytes of what was read, or all, and have more read."""
        self._poll_readers()
        self._copy_read(most)
        self._dispatch()

    def _go_on_beside(self, pace: Pace) -> None:
        """Go on with loads while others run, as long as the pace lets them."""
        if not self._read:
            self._poll_readers()
        while self._read and pace.is_left:
            self._copy_read(1)
        if pace.is_left:
            self._dispatch()

    def _poll_readers(self) -> None:
        """Take note of what readers have read."""
        if self._readers is None or not self._asked:
            return
        for number, result in self._readers.poll():
            self._ended_one(self._asked.pop(number), result)
        for number in self._readers.lost():
            one = self._asked.pop(number)
            self._give_back([one])
            self._staging[one.block.group].wanted.append(one)
        if not self._readers.works:
            self._readers = None

    def _dispatch(self) -> None:
        """Have wanted blocks read, as far as there are rows for them."""
        if self._readers is not None:
            self._ask(self._readers)
            return
        for staging in dict.fromkeys(self._staging.values()):
            begun = list(self._with_rows(staging))
            works = [partial(_read, self._store, one.key, self._data(one), self._codec) for one in begun]
            count = max(1, min(JOB_BYTES // staging.size, len(begun) // (2 * self._threads)))  # small ones by one job
            for first in range(0, len(begun), count):
                own = slice(first, first + count)
                self._background.submit("read", partial(_all, works[own]), partial(self._ended, begun[own]))

    def _ask(self, readers: RowReaders) -> None:
        """Have readers read wanted blocks, unless enough was asked for that the caches do not have."""
        beside = self._pace is not None and self._pace.beside
        for staging in [one for one in dict.fromkeys(self._staging.values()) if one.wanted]:
            most = (BESIDE_BYTES if beside else POLL_BYTES) // staging.size or 1
            if 2 * staging.loads.taken > most:
                continue
            places = list[tuple[int, Key, Place]]()
            for one in self._with_rows(staging, most - staging.loads.taken):
                number = next(self._numbers)
                self._asked[number] = one
                assert one.row is not None
                places.append((number, one.key, place_of(one.row, self._groups[one.block.group].block_bytes)))
            if places:
                readers.ask(places, beside=beside)

    def _with_rows(self, staging: _Staging, most: int | None = None) -> Iterator[_Load]:
        """Give wanted blocks their rows, as far as there are any: `most` blocks, or all."""
        number = 0
        while staging.wanted and (most is None or number < most) and (row := staging.loads.take()) is not None:
            one = staging.wanted.popleft()
            if one.given_up:
                staging.loads.give_back([row])
                continue
            one.row = row
            number += 1
            yield one

    def _data(self, load: _Load) -> Bytes:
        """Return the bytes of a load's row, [block_bytes]."""
        assert load.row is not None
        return load.row[: self._groups[load.block.group].block_bytes].numpy()

    def _ended(self, loads: Sequence[_Load], results: Sequence[Read]) -> None:
        """Take note of reads that have ended."""
        for load, result in zip(loads, results, strict=True):
            self._ended_one(load, result)

    def _ended_one(self, load: _Load, result: Read) -> None:
        """Take note of a read that has ended."""
        if result is None and not load.given_up:
            self._read.append(load)
            return
        if isinstance(result, Exception):
            self._counts.fault(Fault.UNREADABLE.value, "a block cannot be read: %s", result)
        if result is not None:
            self._store.lost(load.key)
        self._give_back([load])
        if not load.given_up:
            self._fail(load)

    def _give_back(self, loads: Sequence[_Load]) -> None:
        """Give back the rows of loads."""
        for one in loads:
            if one.row is not None:
                self._staging[one.block.group].loads.give_back([one.row])

    def _fail(self, load: _Load) -> None:
        del self._loads[load.block.block]
        self._failed.add(load.block.block)

    def _copy_read(self, most: int | None) -> None:
        """Begin to copy blocks that were read into the caches, `most` bytes of them or all. Note which are copied."""
        taken, size = list[_Load](), 0
        while self._read and (most is None or not taken or size < most):
            one = self._read.popleft()
            if one.given_up:
                self._give_back([one])
                continue
            taken.append(one)
            size += self._groups[one.block.group].block_bytes
        if taken:
            pairs = [(one, one.row) for one in taken if one.row is not None]
            self._copying.append((self._run(self._copy.begin_to_device, pairs), taken))
        while self._copying and all(done() for done in self._copying[0][0]):
            _, loads = self._copying.popleft()
            self._give_back(loads)
            self._copied([one for one in loads if not one.given_up])

    def _to_device(self, loads: Sequence[tuple[_Load, torch.Tensor]]) -> None:
        """Copy rows into the caches in the order of the stream. The loads have arrived then."""
        self._run(self._copy.to_device, loads)
        self._copied([one for one, _ in loads])

    def _run(self, copy: Callable[..., _T], loads: Sequence[tuple[_Load, torch.Tensor]]) -> list[_T]:
        """Copy rows into blocks. Return what the copies of each group have returned."""
        found = list[_T]()
        for index, group in enumerate(self._groups):
            if own := [(one, row) for one, row in loads if one.block.group == index]:
                rows = [row[: group.block_bytes] for _, row in own]
                found.append(copy(index, [one.block.block for one, _ in own], rows))
        return found

    def _copied(self, loads: Sequence[_Load]) -> None:
        """Take note of loads that have arrived."""
        for one in loads:
            del self._loads[one.block.block]
            self._arrived.add(one.block.block)
        self._counts.add("loaded", len(loads))


def _write(store: BlockStore, save: _Save, data: Bytes, codec: Codec, counts: Counts) -> bool:
    """Write a row once its copy is complete."""
    while not save.copied():
        time.sleep(COPY_SECONDS)
    stored = codec.encode(save.key.group, data)
    if stored is None:
        counts.add("skipped_not_finite")
        return False
    return store.write(save.ticket, stored)


def _all(works: Sequence[Callable[[], Fault | None]]) -> list[Read]:
    """Do all of some reads. Return what each returned, or its exception."""
    found = list[Read]()
    for work in works:
        try:
            found.append(work())
        except Exception as error:  # whoever asked decides what it means
            found.append(error)
    return found


def _read(store: BlockStore, key: Key, data: Bytes, codec: Codec) -> Fault | None:
    """Read a block into a row."""
    size = codec.sizes[key.group]
    stored = data if size == len(data) else np.empty(size, np.uint8)
    fault = store.read(key, stored)
    if fault is None:
        codec.decode(key.group, stored, data)
    return fault
