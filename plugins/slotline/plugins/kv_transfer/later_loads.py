"""Loads that end in the step that begins them, for requests that wait for theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from slotline.registry.contracts import BlockHash, CacheBlock, KVConnector

FINISH_SECONDS = 10.0
"""Time after which `finish` gives up waiting for the device."""


class LaterLoads:
    """Connector that is not asynchronous, seen as one that is. Implements `AsyncKVConnector`.

    What else the connector can do is found here too.

    Args:
        connector: whose loads can be read by all forward passes that are launched after its `wait`.
        moment: returns a function that says whether the device has done all that it was given so far.
    """

    def __init__(self, connector: KVConnector, moment: Callable[[], Callable[[], bool]]) -> None:
        self._connector, self._moment = connector, moment
        self._coming: list[tuple[Callable[[], bool], set[int]]] = []
        self._said: set[int] = set()  # blocks that the connector has said to have failed
        self._failed: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return self._connector.held(group, hashes)

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        self._connector.start(saves, loads)
        if loads:
            self._connector.wait()
            self._coming.append((self._moment(), {one.block for one in loads}))

    def wait(self) -> None:
        self._connector.wait()

    def arrived(self) -> Collection[int]:
        """Return the blocks of the steps that are over, without those whose load failed."""
        ended = set[int]().union(*(blocks for is_over, blocks in self._coming if is_over()))
        self._coming = [(is_over, blocks) for is_over, blocks in self._coming if blocks.isdisjoint(ended)]
        self._said |= set(self._connector.failed()) if ended else set()
        failed = self._said & ended
        self._said -= failed
        self._failed |= failed
        return ended - failed

    def failed(self) -> Collection[int]:
        failed, self._failed = self._failed, set()
        return failed

    def finish(self) -> None:
        latest = time.monotonic() + FINISH_SECONDS
        while not all(is_over() for is_over, _ in self._coming) and time.monotonic() < latest:
            time.sleep(0.0005)

    def reset(self) -> None:
        self._connector.reset()
