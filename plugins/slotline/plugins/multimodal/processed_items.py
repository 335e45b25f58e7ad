"""Items as the model's processor made them, kept on the host for requests that show the same again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

import numpy as np
import torch

from slotline.registry.contracts import ProcessedItem

_MODES = frozenset({"L", "RGB", "RGBA"})
"""Modes of PIL images whose bytes are all that they show, without a palette."""


class ProcessedItems:
    """Processed items by the content they were made of. The least recently used go first. Threads may share it.

    Args:
        process: makes one, see `MultimodalModel.process`. Equal items have to give equal inputs.
        capacity: bytes of the inputs that are kept.
    """

    def __init__(self, process: Callable[[str, Any], ProcessedItem], capacity: int) -> None:
        self._process, self._capacity = process, capacity
        self._kept: OrderedDict[bytes, ProcessedItem] = OrderedDict()
        self._size, self._lock = 0, Lock()

    def get(self, modality: str, given: Any) -> ProcessedItem:
        """Return an item as the model reads it, processed now or before.

        Raises:
            RequestError: if it cannot be read.
        """
        key = _key(modality, given)
        if key is None:
            return self._process(modality, given)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        item = self._process(modality, given)
        with self._lock:
            if key not in self._kept and (size := _size(item)) <= self._capacity:
                self._kept[key] = item
                self._size += size
                while self._size > self._capacity:
                    self._size -= _size(self._kept.popitem(last=False)[1])
        return item


def _size(item: ProcessedItem) -> int:
    return sum(value.nbytes for value in item.inputs.values())


def _key(modality: str, given: Any) -> bytes | None:
    """Return a hash of an item's content, None for another kind than images, arrays, bytes and their mappings."""
    digest = hashlib.sha256(modality.encode())
    return digest.digest() if _add(digest, given) else None


def _add(digest: Any, given: Any) -> bool:
    """Add an item to a hash. Return False if its content is not known to be all that it is."""
    kind: Any = type(given)
    if isinstance(given, Mapping):
        digest.update(f"\0{len(given)}".encode())
        return all(_add(digest, str(name)) and _add(digest, value) for name, value in given.items())
    if given is None or kind in (str, int, float, bool):
        digest.update(f"\0{kind.__name__}\0{given!r}".encode())
        return True
    if kind is bytes:
        digest.update(f"\0bytes\0{len(given)}\0".encode() + given)
        return True
    if kind is torch.Tensor and given.device.type == "cpu" and given.layout is torch.strided:
        digest.update(f"\0tensor\0{given.dtype}\0{tuple(given.shape)}\0".encode())
        digest.update(given.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return True
    if kind is np.ndarray and given.dtype.kind in "biuf":
        digest.update(f"\0array\0{given.dtype.str}\0{given.shape}\0".encode())
        digest.update(np.ascontiguousarray(given).data)
        return True
    if getattr(given, "mode", None) in _MODES and kind.__module__.startswith("PIL."):
        digest.update(f"\0image\0{given.mode}\0{given.size}\0{given.info.get('transparency')!r}\0".encode())
        digest.update(given.tobytes())
        return True
    return False
