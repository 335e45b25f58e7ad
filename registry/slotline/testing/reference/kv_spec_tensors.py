"""Cache spec of codes with scales, and of plain keys and values with a summary of each block: written for clarity."""

from __future__ import annotations

from math import prod

import torch

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import (
    FORMAT_DTYPES,
    INT8_TOKEN_HEAD,
    AttentionLayer,
    CacheTensor,
    CacheTensors,
    KVSpecCapabilities,
    KVSpecContext,
)
from slotline.registry.descriptor import Descriptor, Kind
from slotline.testing.reference.kv_spec import WindowedSpec

SUMMARIES = "reference_summaries"
"""Format: keys, values, and the largest and smallest elements of each kernel block's keys (Quest, arXiv 2406.10774)."""


class TensorsSpec(WindowedSpec):
    """Tensors one after another in each kernel block, each from a multiple of its alignment on."""

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        self.size = context.kernel_block_size

    def tensors(self, layer: AttentionLayer) -> tuple[CacheTensor, ...]:
        """Return the tensors of a layer."""
        heads, keys, values = layer.num_kv_heads, (layer.num_kv_heads, layer.head_size), layer.head_size_v
        element = FORMAT_DTYPES.get(self.context.format, self.context.kv_dtype)
        both = (
            CacheTensor("key", element, keys, by_head=True),
            CacheTensor("value", element, (heads, values), by_head=True),
        )
        if self.context.format == SUMMARIES:
            return (*both, CacheTensor("bounds", "float32", (2, *keys), per="block"))
        scales = (CacheTensor(f"{name}_scale", "float32", (heads,), by_head=True) for name in ("key", "value"))
        return (*both, *scales)

    def places(self, layer: AttentionLayer) -> tuple[dict[str, int], int]:
        """Return the first byte of each tensor in a kernel block, and the block's bytes."""
        places, end = {}, 0
        for tensor in self.tensors(layer):
            places[tensor.name] = self.aligned(end, tensor.alignment)
            end = places[tensor.name] + self.bytes_of(tensor)
        return places, self.aligned(end, 16)

    def aligned(self, place: int, alignment: int) -> int:
        """Round a place up to a multiple of the alignment."""
        return -(-place // alignment) * alignment

    def bytes_of(self, tensor: CacheTensor) -> int:
        """Return the bytes of a tensor in a kernel block."""
        entries = self.size if tensor.per == "token" else 1
        return int(entries * prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize)

    def page_bytes(self, layer: AttentionLayer) -> int:
        return self.places(layer)[1] * (self.block_size // self.size)

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> CacheTensors:  # type: ignore[override]
        places, end = self.places(layer)
        rows = raw.view(num_blocks * (self.block_size // self.size), end)
        found = {}
        for tensor in self.tensors(layer):
            first = places[tensor.name]
            part = rows[:, first : first + self.bytes_of(tensor)].view(getattr(torch, tensor.dtype))
            found[tensor.name] = self.shaped(part, tensor)
        return CacheTensors(found)

    def shaped(self, part: torch.Tensor, tensor: CacheTensor) -> torch.Tensor:
        """View a tensor's elements, [num_kernel_blocks, elements], in its shape."""
        if tensor.per == "block":
            return part.view(len(part), *tensor.shape)
        if tensor.by_head and self.context.layout == "HND":
            return part.view(len(part), tensor.shape[0], self.size, *tensor.shape[1:]).transpose(1, 2)
        return part.view(len(part), self.size, *tensor.shape)


descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="reference_tensors",
    summary="codes with scales, or keys and values with a summary of each block",
    capabilities=KVSpecCapabilities(
        kv_kinds=Set(("full", "sliding")),
        exact_kinds=Set(("full", "sliding")),
        page_stride=Flag(True),
        formats=Set((INT8_TOKEN_HEAD, SUMMARIES)),
    ),
    factory=TensorsSpec,
)
