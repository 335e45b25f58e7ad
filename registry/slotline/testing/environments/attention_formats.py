"""Batches over caches of codes and scales: a `World` whose keys and values are stored in a format of the contract.

Keys and values are vectors that the format stores without an error, so that what a cache must hold is known to the bit
and the tolerance is that of a plain cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slotline.registry.contracts.cache_tensors import CacheTensors, stored_size
from slotline.testing.environments.attention import World, raw
from slotline.testing.environments.attention_case import FIRST_BLOCK, NULL_BLOCK, POISON_BLOCK
from slotline.testing.oracles import cache_formats as oracle

GAP = 64
"""Bytes behind a kernel block's tensors, which nobody may read or write."""

NO_CODE = {torch.int8: 0x80, torch.float8_e4m3fn: 0x7F, torch.uint8: 0x00}
"""Byte of each dtype of codes that is the code of nothing: -128, NaN, and -8 twice."""


class CodedWorld(World):
    """World whose cache holds codes and scales. Its keys and values are of the case's dtype."""

    def key_of(self, length: int) -> torch.Tensor:
        """Return keys [length, Hkv, D] that are stored without an error."""
        return self._exact(length, self.case.head_size)

    def value_of(self, key: torch.Tensor) -> torch.Tensor:
        """Return as many values [L, Hkv, Dv] that are stored without an error."""
        return self._exact(len(key), self.layer.head_size_v)

    def _exact(self, length: int, size: int) -> torch.Tensor:
        case = self.case
        shape = (length, case.num_kv_heads, size)
        return oracle.exact_vectors(shape, case.cache_format, case.stored_dtype, self._generator).to(case.dtype)

    def empty_cache(self) -> tuple[list[torch.Tensor], Any]:
        """Return the memory of the kernel blocks, and its tensors: codes of keys and values, then scales of both."""
        case, n = self.case, self.num_blocks
        heads, tokens, code = case.num_kv_heads, case.block_size, case.stored_dtype
        shapes = {
            "key": (code, (stored_size(case.cache_format, case.head_size),)),
            "value": (code, (stored_size(case.cache_format, self.layer.head_size_v),)),
            "key_scale": (torch.float32, ()),
            "value_scale": (torch.float32, ()),
        }
        sizes = {
            name: tokens * heads * (width[0] if width else 1) * dtype.itemsize
            for name, (dtype, width) in shapes.items()
        }
        places, end = {}, 0
        for name, size in sizes.items():
            places[name], end = end, -(-(end + size) // 16) * 16
        whole = torch.zeros(n, end + (GAP if case.strided else 0), dtype=torch.uint8, device=self.device)
        parts, buffers = {}, [whole]
        for name, first in places.items():
            parts[name] = whole[:, first : first + sizes[name]]
        if not case.strided:
            parts = {name: torch.zeros_like(part) for name, part in parts.items()}
            buffers = list(parts.values())
        views = {}
        for name, (dtype, width) in shapes.items():
            outer = (tokens, heads) if case.layout == "NHD" else (heads, tokens)
            view = parts[name].view(dtype).view(n, *outer, *width)
            views[name] = view if case.layout == "NHD" else view.transpose(1, 2)
        self._spoil(views, whole[:, end:] if case.strided else whole[:, :0])
        return buffers, CacheTensors(views)

    def _spoil(self, views: dict[str, torch.Tensor], gaps: torch.Tensor) -> None:
        """Put codes that no vector has, and scales of NaN, where nothing may be read."""
        rows: dict[str, Sequence[int]] = {"null block": [NULL_BLOCK], "poison block": [POISON_BLOCK]}
        owned = {block for own in self.owned for block in own} - {NULL_BLOCK}
        rows["unused blocks"] = sorted(set(range(FIRST_BLOCK, self.num_blocks)) - owned)
        rows["unused slots"] = sorted(owned)
        for place, blocks in rows.items():
            if place in self.case.poisoned:
                index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
                for name, view in views.items():
                    if name.endswith("_scale"):
                        view[index] = torch.nan
                    else:
                        raw(view)[index] = NO_CODE[view.dtype]
        if "gaps" in self.case.poisoned:
            gaps.fill_(0xFF)

    def put(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, live: bool = True) -> None:
        """Put codes and scales of keys and values into slots."""
        where = slots.to(self.device)
        place = (where // self.case.block_size, where % self.case.block_size)
        for name, dense in (("key", keys), ("value", values)):
            codes, scale = oracle.encode(dense, self.case.cache_format, self.case.stored_dtype)
            raw(self.cache[name])[place] = raw(codes).to(self.device)
            self.cache[f"{name}_scale"][place] = scale.to(self.device)

    def stored(self, request: int, name: str) -> torch.Tensor:
        """Return what the cache holds of a request's keys or values, [L, Hkv, D] float32 on the host."""
        slots = self.slots(request, range(self.case.requests[request][1])).to(self.device)
        place = (slots // self.case.block_size, slots % self.case.block_size)
        codes = raw(self.cache[name])[place].view(self.case.stored_dtype)
        size = self.case.head_size if name == "key" else self.layer.head_size_v
        return oracle.decode(codes.cpu(), self.cache[f"{name}_scale"][place].cpu(), self.case.cache_format, size)
