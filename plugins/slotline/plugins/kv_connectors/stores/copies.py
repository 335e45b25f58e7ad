"""Copies beside forward passes, also with copies that know only those in the order of a device's stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from slotline.registry.contracts import BlockCopy, BlockCopyBeside, KVCache, KVConnectorContext

Done = Callable[[], bool]
"""Whether copies are over. Any thread may call it."""


def devices_of(context: KVConnectorContext) -> list[torch.device]:
    """Return the GPUs that have caches, in order."""
    caches = (cache for cache in context.caches.values() if isinstance(cache, KVCache))
    devices = {cache.key.device for cache in caches} | {torch.device(context.device)}
    return sorted((device for device in devices if device.type == "cuda"), key=str)


class Copies:
    """The copies of a context. Implements `BlockCopyBeside`.

    Args:
        copy: of the context.
        devices: the GPUs that have caches.
    """

    def __init__(self, copy: BlockCopy, devices: Sequence[torch.device]) -> None:
        self._copy, self._devices = copy, devices
        self._beside = cast("BlockCopyBeside", copy) if hasattr(copy, "begin_to_device") else None
        self.to_host, self.to_device = copy.to_host, copy.to_device

    def begin_to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Done:
        """See `BlockCopyBeside`."""
        if self._beside is not None:
            return self._beside.begin_to_host(group, blocks, rows)
        self._copy.to_host(group, blocks, rows)
        return self.after()

    def begin_to_device(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Done:
        """See `BlockCopyBeside`."""
        if self._beside is not None:
            return self._beside.begin_to_device(group, blocks, rows)
        self._copy.to_device(group, blocks, rows)
        return self.after()

    def after(self) -> Done:
        """Return whether all is over that the devices were given so far."""
        events = list[Any]()
        for device in self._devices:
            with torch.cuda.device(device):
                events.append(torch.cuda.Event())
                events[-1].record()
        return lambda: all(event.query() for event in events)
