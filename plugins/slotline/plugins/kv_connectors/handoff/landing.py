"""Blocks that have come from peers, on their way from host memory into the caches, beside the steps of others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from slotline.plugins.kv_connectors.handoff.store import copied
from slotline.plugins.kv_connectors.stores.copies import Copies, Done
from slotline.registry.contracts import BlockCopy, CacheBlock

HOST_BYTES, DEVICE_BYTES = 16 * 2**20, 128 * 2**20
"""Bytes that a step begins to copy at most, into caches in host memory, where it waits for them, and on GPUs."""


class Landing:
    """Copier of blocks that have come.

    Args:
        copy: copies blocks.
        devices: the GPUs that have caches.
    """

    def __init__(self, copy: BlockCopy, devices: Sequence[torch.device]) -> None:
        self._copies = Copies(copy, devices)
        self._most = DEVICE_BYTES if devices else HOST_BYTES
        self._come: deque[tuple[CacheBlock, torch.Tensor]] = deque()
        self._begun: deque[tuple[list[Done], list[tuple[CacheBlock, torch.Tensor]]]] = deque()

    def take(self, blocks: Iterable[tuple[CacheBlock, torch.Tensor]]) -> None:
        """Take blocks with their bytes."""
        self._come += blocks

    def landed(self) -> set[int]:
        """Begin to copy some blocks. Return those that the caches have now, of those since the last call."""
        if self._come:
            self._begin(self._most)
        found = set[int]()
        while self._begun and all(done() for done in self._begun[0][0]):
            found |= {one.block for one, _ in self._begun.popleft()[1]}
        return found

    def finish(self) -> set[int]:
        """Copy all blocks. Return those that the caches have now, of those since the last call."""
        found = self.landed()
        while self._come or self._begun:
            time.sleep(0.0002)
            found |= self.landed()
        return found

    def _begin(self, most: int) -> None:
        taken, size = list[tuple[CacheBlock, torch.Tensor]](), 0
        while self._come and (not taken or size + len(self._come[0][1]) <= most):
            taken.append(self._come.popleft())
            size += len(taken[-1][1])
        self._begun.append((copied(self._copies.begin_to_device, taken), taken))
