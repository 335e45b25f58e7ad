"""Common parts of the LoRA plugins: assignment of adapters to slots, and adapters kept in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any

import torch
from attrs import evolve
from torch.nn import functional

from slotline.plugins.lora.peft_folder import PeftAdapter, Share, read, signature
from slotline.registry.contracts import LoraContext
from slotline.registry.errors import CapacityError, RequestError


class AdapterSlots(ABC):
    """Slots on the device, and the adapters read last in host memory, so that a swap reads no file.

    Attributes:
        context: what the plugin was built for.
    """

    def __init__(self, context: LoraContext) -> None:
        self.context = context
        self._slots: dict[str, int] = {}  # name -> slot
        self._read: OrderedDict[str, tuple[Any, PeftAdapter]] = OrderedDict()  # path -> signature, adapter

    def load(self, name: str, path: str) -> int:
        """See `slotline.registry.contracts.lora.Lora.load`."""
        if name in self._slots:
            raise RequestError(f"adapter {name!r} is loaded already", fix="unload it first")
        adapter = self._adapter(path)  # every fault is found before anything changes
        free = set(range(self.context.max_adapters)) - set(self._slots.values())
        if not free:
            raise CapacityError(
                f"adapter {name!r}: all {self.context.max_adapters} slots are taken",
                fix="unload one, or raise lora.max_adapters",
            )
        slot = min(free)
        self._write(slot, adapter)
        self._slots[name] = slot
        return slot

    def unload(self, name: str) -> None:
        """Unload an adapter (see `slotline.registry.contracts.lora.Lora.unload`).

        It stays in host memory for a while.
        """
        if name not in self._slots:
            raise RequestError(f"adapter {name!r} is not loaded", fix=f"loaded are: {sorted(self._slots)}")
        self._clear(self._slots.pop(name))

    def forget(self, path: str) -> None:
        """See `slotline.registry.contracts.lora.ForgetfulLora.forget`."""
        self._read.pop(path, None)

    @abstractmethod
    def _write(self, slot: int, adapter: PeftAdapter) -> None:
        """Put an adapter into a slot, replacing all previous contents."""

    @abstractmethod
    def _clear(self, slot: int) -> None:
        """Clear a slot, which adds nothing from now on."""

    def _adapter(self, path: str) -> PeftAdapter:
        """Return the folder's adapter, from host memory if it was read before and has not changed."""
        found = signature(path)
        if path in self._read and self._read[path][0] == found:
            self._read.move_to_end(path)
            return self._read[path][1]
        context = self.context
        modules = {**context.modules, **context.elsewhere}
        modules |= {name: (part.in_features, part.out_features) for name, part in context.parts.items()}
        adapter = read(path, modules, context.max_rank, context.embeddings)
        own = {name: self._own(name, share) for name, share in adapter.shares.items() if name in context.modules}
        adapter = evolve(adapter, shares=own)
        self._read.pop(path, None)
        self._read[path] = (found, adapter)
        while len(self._read) > self.context.max_cpu_adapters:
            self._read.popitem(last=False)
        return adapter

    def _own(self, module: str, share: Share) -> Share:
        """Return what a rank has of a module's weights."""
        if (part := self.context.parts.get(module)) is None:
            return share
        inner, outer = self.context.modules[module]
        return evolve(share, a=_part(share.a, 1, part.inputs, inner), b=_part(share.b, 0, part.outputs, outer))


def _part(weight: torch.Tensor, dim: int, places: torch.Tensor | None, size: int) -> torch.Tensor:
    """Return places [n] of a dimension of a matrix, and zeros up to a size."""
    if places is None:
        return weight
    part = weight.index_select(dim, places)
    missing = size - len(places)
    return functional.pad(part, (0, missing) if dim == 1 else (0, 0, 0, missing)) if missing else part
