"""Saves of blocks to the store, by a thread: no step waits for them.

Blocks whose layers are announced are copied layer by layer while the step computes. They are published once the step
has ended well, and then nothing of them is left to be copied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, cast

import torch
from attrs import define, field

from slotline.plugins.kv_connectors.handoff.store import Key, Store, copied, key_of
from slotline.registry.contracts import BlockCopy, CacheBlock, ConnectorGroup, LayerBlockCopy

logger = logging.getLogger("slotline")
Batch = list[tuple[CacheBlock, torch.Tensor]]
"""Blocks that are saved together, with their rows."""
PATIENCE = 8
"""Steps after which a block that was announced counts as one that its step has not made."""


@define(eq=False)
class _Filling:
    """A block that a step fills.

    Attributes:
        block: its place in the pool.
        row: its place in the store.
        layers: whose part of it is copied or is about to be, by position.
        age: steps since then.
    """

    block: CacheBlock
    row: torch.Tensor
    layers: set[int] = field(factory=set)
    age: int = 0


class Saver:
    """Copier of blocks to rows of a store.

    On a GPU the step starts the copies, and the thread waits for them: a block may be overwritten at once, since later
    work on the device comes behind. Elsewhere the thread copies, and a block must stay as it is until `saved` names it.
    A block that is copied while its step runs may be overwritten meanwhile. It is published only if `save` names it
    afterwards, and then it has stayed as it was.

    Args:
        store: takes the blocks.
        copy: copies them.
        device: of the caches.
        groups: of the blocks.
    """

    def __init__(self, store: Store, copy: BlockCopy, device: str, groups: Sequence[ConnectorGroup] = ()) -> None:
        self._store, self._copy, self._groups = store, copy, tuple(groups)
        self._device = torch.device(device) if torch.device(device).type == "cuda" else None
        if self._device:
            store.pin()
        self._place = {
            layer.index: (number, position)
            for number, group in enumerate(groups)
            for position, layer in enumerate(group.layers if group.layer_bytes else ())
        }
        self._filling: dict[Key, _Filling] = {}  # those that `save` has not named yet
        self._now: list[_Filling] = []  # those of the step that runs
        self._queue: SimpleQueue[Sequence[Callable[[], Any]] | None] = SimpleQueue()
        self._saved: set[int] = set()
        self._changed, self._left = Condition(), 0
        self._thread: Thread | None = None

    def filling(self, blocks: Sequence[CacheBlock]) -> None:
        """Begin to save blocks that the next step fills, those that the store does not have."""
        self._age()
        own = {key_of(one): one for one in blocks if self._groups[one.group].layer_bytes}
        again = [key for key in own if key in self._filling]
        rows = {key: self._filling[key].row for key in again}
        rows |= dict(self._store.take([key for key in own if key not in rows], ()))
        if again:
            self._do(partial(self._store.restart, again))
        self._now = [_Filling(own[key], row) for key, row in rows.items()]
        self._filling |= {key_of(one.block): one for one in self._now}

    def save_layer(self, layer: int) -> None:
        """Save the part of a layer of the blocks that the step fills, beside the layers behind it."""
        group, position = self._place.get(layer, (-1, 0))
        now = [one for one in self._now if one.block.group == group]
        if not now:
            return
        sizes = self._groups[group].layer_bytes
        first = sum(sizes[:position])
        blocks, rows = [one.block.block for one in now], [one.row for one in now]
        begin = partial(cast("LayerBlockCopy", self._copy).begin_layer_to_host, group, position, blocks, rows)
        copy = partial(_wait_for, begin()) if self._device else lambda: _wait_for(begin())
        for one in now:
            one.layers.add(position)
        wrote = partial(self._store.wrote, [key_of(one.block) for one in now], first, first + sizes[position])
        self._do(copy, wrote)

    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        """Begin to save blocks. Those that the store has, or has no room for, are done at once.

        Args:
            saves: the blocks.
            wanted: blocks that must stay in the store.
        """
        new, batch, there = {key_of(one): one for one in saves}, Batch(), Batch()
        for key in [key for key in new if key in self._filling]:
            filling, count = self._filling.pop(key), len(self._groups[key[0]].layers)
            is_whole = filling.block.block == new[key].block and len(filling.layers) == count
            (there if is_whole else batch).append((new[key], filling.row))
        batch += [(new[key], row) for key, row in self._store.take(list(new), wanted)]
        reading = set[int]() if self._device else {one.block for one, _ in (*batch, *there)}
        with self._changed:
            self._saved |= {one.block for one in saves} - reading
        if self._device and batch:
            copied(self._copy.to_host, batch)
        if batch or there:
            self._do(partial(self._publish, there, batch))

    def saved(self) -> Collection[int]:
        """Return the blocks that may be overwritten, of those since the last call."""
        with self._changed:
            saved, self._saved = self._saved, set()
        return saved

    def wait(self) -> None:
        """Wait until all saves have ended. Blocks that were announced and not saved are given up."""
        self._discard(list(self._filling))
        with self._changed:
            self._changed.wait_for(lambda: not self._left)

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)

    def _age(self) -> None:
        """Give up blocks that were announced some steps ago."""
        for one in self._filling.values():
            one.age += 1
        self._discard([key for key, one in self._filling.items() if one.age > PATIENCE])

    def _discard(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del self._filling[key]
        self._now = [one for one in self._now if self._filling.get(key_of(one.block)) is one]
        if keys:
            self._do(partial(self._store.discard, keys))

    def _do(self, *work: Callable[[], Any]) -> None:
        """Have the thread do something, in order."""
        with self._changed:
            self._left += 1
        if self._thread is None:
            self._thread = Thread(target=self._run, name="slotline-handoff-save", daemon=True)
            self._thread.start()
        self._queue.put(work)

    def _publish(self, there: Batch, batch: Batch) -> None:
        """Have blocks found, those of `there` as they are if all of their parts are copied."""
        torn = [(one, row) for one, row in there if not self._store.is_whole(key_of(one))]
        keys = [key_of(one) for one, _ in (*there, *batch)]
        try:
            if self._device is not None:
                self._store.discard([key_of(one) for one, _ in torn])
                if batch:
                    torch.cuda.synchronize(self._device)
            else:
                self._store.restart([key_of(one) for one, _ in (*torn, *batch)])
                copied(self._copy.to_host, [*torn, *batch])
            self._store.publish(keys)
        except Exception:  # of the device
            logger.exception("kv_connector.handoff cannot save %d blocks", len(keys))
            self._store.discard(keys)
        with self._changed:
            self._saved |= {one.block for one, _ in (*there, *batch)} if self._device is None else set()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                for one in work:
                    one()
            except Exception:  # of the device
                logger.exception("kv_connector.handoff cannot save a layer's part of blocks")
            del work
            with self._changed:
                self._left -= 1
                self._changed.notify_all()


def _wait_for(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.0001)
