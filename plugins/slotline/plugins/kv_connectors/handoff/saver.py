"""Saves of blocks to the store, by a thread: no step waits for them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from queue import SimpleQueue
from threading import Condition, Thread

import torch

from slotline.plugins.kv_connectors.handoff.store import Key, Store, copied, key_of
from slotline.registry.contracts import BlockCopy, CacheBlock

logger = logging.getLogger("slotline")
Batch = list[tuple[CacheBlock, torch.Tensor]]
"""Blocks that are saved together, with their rows."""


class Saver:
    """Copier of blocks to rows of a store.

    On a GPU the step starts the copies, and the thread waits for them: a block may be overwritten at once, since later
    work on the device comes behind. Elsewhere the thread copies, and a block must stay as it is until `saved` names it.

    Args:
        store: takes the blocks.
        copy: copies them.
        device: of the caches.
    """

    def __init__(self, store: Store, copy: BlockCopy, device: str) -> None:
        self._store, self._copy = store, copy
        self._device = torch.device(device) if torch.device(device).type == "cuda" else None
        if self._device:
            store.pin()
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._saved: set[int] = set()
        self._changed, self._left = Condition(), 0
        self._thread: Thread | None = None

    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        """Begin to save blocks. Those that the store has, or has no room for, are done at once.

        Args:
            saves: the blocks.
            wanted: blocks that must stay in the store.
        """
        new = {key_of(one): one for one in saves}
        batch = [(new[key], row) for key, row in self._store.take(list(new), wanted)]
        reading = set[int]() if self._device else {one.block for one, _ in batch}
        with self._changed:
            self._saved |= {one.block for one in saves} - reading
            self._left += bool(batch)
        if not batch:
            return
        if self._device:
            copied(self._copy.to_host, batch)
        if self._thread is None:
            self._thread = Thread(target=self._run, name="slotline-handoff-save", daemon=True)
            self._thread.start()
        self._queue.put(batch)

    def saved(self) -> Collection[int]:
        """Return the blocks that may be overwritten, of those since the last call."""
        with self._changed:
            saved, self._saved = self._saved, set()
        return saved

    def wait(self) -> None:
        """Wait until all saves have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left)

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            keys = [key_of(one) for one, _ in batch]
            try:
                if self._device:
                    torch.cuda.synchronize(self._device)
                else:
                    copied(self._copy.to_host, batch)
                self._store.publish(keys)
            except Exception:  # of the device
                logger.exception("kv_connector.handoff cannot save %d blocks", len(batch))
                self._store.discard(keys)
            with self._changed:
                self._saved |= {one.block for one, _ in batch} if self._device is None else set()
                self._left -= 1
                self._changed.notify_all()
