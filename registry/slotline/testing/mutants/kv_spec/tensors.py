"""Cache specs that are wrong about named tensors."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from slotline.registry.capability import Set
from slotline.registry.contracts import AttentionLayer, CacheTensor, CacheTensors, KVCache
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference.kv_spec_tensors import SUMMARIES, TensorsSpec, descriptor


class ForgetsScales(TensorsSpec):
    def page_bytes(self, layer: AttentionLayer) -> int:
        both = sum(self.bytes_of(tensor) for tensor in self.tensors(layer)[:2])
        return self.aligned(both, 16) * (self.block_size // self.size)

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> CacheTensors:  # type: ignore[override]
        more = torch.zeros(num_blocks * super().page_bytes(layer), dtype=torch.uint8)
        return super().bind(more, layer, num_blocks)


class OnePageForAllKernelBlocks(TensorsSpec):
    def page_bytes(self, layer: AttentionLayer) -> int:
        return self.places(layer)[1]


class OddPage(TensorsSpec):
    """A page's bytes cannot be divided into its kernel blocks."""

    def page_bytes(self, layer: AttentionLayer) -> int:
        return super().page_bytes(layer) + 1


class ScalesOverValues(TensorsSpec):
    def places(self, layer: AttentionLayer) -> tuple[dict[str, int], int]:
        places, end = super().places(layer)
        last = list(places)[-1]
        return {**places, last: places["value"]}, end


class ScalesBehindAllBlocks(TensorsSpec):
    """The last tensor of all kernel blocks lies together: right for one engine, lost when a block is copied."""

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> CacheTensors:  # type: ignore[override]
        cache = dict(super().bind(raw, layer, num_blocks))
        name, view = list(cache.items())[-1]
        end = raw.reshape(-1)[-view.numel() * view.element_size() :].view(view.dtype)
        heads_first = view.dim() == 3 and self.context.layout == "HND"
        shaped = end.view(view.transpose(1, 2).shape).transpose(1, 2) if heads_first else end.view(view.shape)
        return CacheTensors({**cache, name: shaped})


class Unaligned(TensorsSpec):
    """Declares an alignment that it does not keep."""

    def aligned(self, place: int, alignment: int) -> int:
        return super().aligned(place, min(alignment, 4))


class IgnoresLayout(TensorsSpec):
    def shaped(self, part: torch.Tensor, tensor: CacheTensor) -> torch.Tensor:
        if tensor.per == "block":
            return super().shaped(part, tensor)
        return part.view(len(part), self.size, *tensor.shape)


class ScalesOfBlocks(TensorsSpec):
    """Keeps one entry of the last tensor for each block, whatever it says."""

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> CacheTensors:  # type: ignore[override]
        cache = dict(super().bind(raw, layer, num_blocks))
        name = list(cache)[-1]
        return CacheTensors({**cache, name: cache[name][:, 0]})


class PlainCache(TensorsSpec):
    """Returns keys and values where tensors were negotiated."""

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> Any:
        cache = super().bind(raw, layer, num_blocks)
        return KVCache(cache.key, cache.value)


class OtherDtype(TensorsSpec):
    def shaped(self, part: torch.Tensor, tensor: CacheTensor) -> torch.Tensor:
        found = super().shaped(part, tensor)
        return found.view(torch.int32) if found.dtype == torch.float32 else found


class CopiesTensors(TensorsSpec):
    def shaped(self, part: torch.Tensor, tensor: CacheTensor) -> torch.Tensor:
        return super().shaped(part.clone(), tensor)


class FreesWithTensors(TensorsSpec):
    """Gives back one block too many, as only reading the tensors shows."""

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return super().blocks_freeable(num_computed_tokens) + (num_computed_tokens > 2 * self.block_size)


def _mutant(name: str, level: Level, summary: str, factory: Any) -> Mutant:
    changed = attrs.evolve(descriptor, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory)
    return Mutant(name, summary, level, changed)


L1, L2 = Level.NUMERICS, Level.HOSTILE

MUTANTS = (
    _mutant("tensors-without-scales", L1, "its pages have no room for the scales", ForgetsScales),
    _mutant("tensors-kernel-page", L1, "its pages have room for one kernel block", OnePageForAllKernelBlocks),
    _mutant("tensors-odd-page", L1, "its pages cannot be divided into kernel blocks", OddPage),
    _mutant("tensors-over-each-other", L2, "the last tensor lies where the values are", ScalesOverValues),
    _mutant("tensors-behind-all", L2, "the last tensor of all blocks lies behind them", ScalesBehindAllBlocks),
    _mutant("tensors-unaligned", L2, "tensors do not begin at the declared alignment", Unaligned),
    _mutant("tensors-ignore-layout", L1, "tensors are NHD whatever was negotiated", IgnoresLayout),
    _mutant("tensors-of-blocks", L1, "one entry a block where one a token is declared", ScalesOfBlocks),
    _mutant("tensors-plain-cache", L1, "binds a KVCache", PlainCache),
    _mutant("tensors-other-dtype", L1, "binds a tensor in another dtype than it declares", OtherDtype),
    _mutant("tensors-copied", L2, "binds copies of the memory", CopiesTensors),
    _mutant("tensors-freed-early", L1, "gives back a block that is still read", FreesWithTensors),
)
CORRECT = (
    Correct("codes with scales, and summaries of blocks", descriptor),
    Correct(
        "summaries of blocks alone",
        attrs.evolve(
            descriptor,
            name="summaries",
            capabilities=attrs.evolve(descriptor.capabilities, formats=Set((SUMMARIES,))),
        ),
    ),
)
