"""Mutants that keep wrong bounds of blocks, or leave out the wrong blocks, and a right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.cache_tensors import KEY_BOUNDS
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.attention.making import mutant, offer
from slotline.testing.reference.attention.bounded import BoundedAttention


class Grow(BoundedAttention):
    """Bounds only grow: an old key's stay."""

    def bound(self, bounds: torch.Tensor, block: int, keys: torch.Tensor) -> None:
        low, high = bounds[block].clone()
        bounds[block] = torch.stack([torch.fmin(low, keys.amin(0)), torch.fmax(high, keys.amax(0))])


class NewAlone(BoundedAttention):
    """The block's earlier keys do not count."""

    def bound(self, bounds: torch.Tensor, block: int, keys: torch.Tensor) -> None:
        super().bound(bounds, block, keys[-1:])


class WholeBlock(BoundedAttention):
    """Slots behind the last key count too."""

    def counted(self, last: int) -> int:
        return self.block_size


class FullBlocks(BoundedAttention):
    """Blocks get bounds when they are full."""

    def bound(self, bounds: torch.Tensor, block: int, keys: torch.Tensor) -> None:
        if len(keys) == self.block_size:
            super().bound(bounds, block, keys)


class LastBlock(BoundedAttention):
    """Of the blocks of a chunk only the last one gets bounds."""

    def written(self, slots: torch.Tensor) -> list[int]:
        return super().written(slots)[-1:]


class OneLess(BoundedAttention):
    """The newest key does not count."""

    def counted(self, last: int) -> int:
        return max(last, 1)


class Turned(BoundedAttention):
    """The largest numbers come first."""

    def bound(self, bounds: torch.Tensor, block: int, keys: torch.Tensor) -> None:
        bounds[block] = torch.stack([keys.amax(0), keys.amin(0)])


class OneHead(BoundedAttention):
    """The first head's bounds are those of all."""

    def bound(self, bounds: torch.Tensor, block: int, keys: torch.Tensor) -> None:
        super().bound(bounds, block, keys[:, :1].expand_as(keys))


class LargestOnly(BoundedAttention):
    """Negative elements of a query meet the largest keys."""

    def best(self, query: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        return super().best(query, bounds[:, 1:].expand_as(bounds))


class FirstHead(BoundedAttention):
    """The first KV head chooses for all."""

    def best(self, query: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        return super().best(query[: len(query) // bounds.shape[2]], bounds[:, :, :1])


class Center(BoundedAttention):
    """Blocks are judged by the middle of their bounds."""

    def best(self, query: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        middle = bounds.mean(1, keepdim=True)
        return super().best(query, middle.expand_as(bounds))


class Worst(BoundedAttention):
    """The blocks with the smallest bounds are kept."""

    def kept(self, best: torch.Tensor) -> torch.Tensor:
        return super().kept(-best)


class NewestLeftOut(BoundedAttention):
    """The newest block is judged as if it had no keys."""

    def kept(self, best: torch.Tensor) -> torch.Tensor:
        return best[:-1].topk(self.most).indices


class AlwaysSparse(BoundedAttention):
    """Leaves blocks out although all keys are asked for."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.exact = False


OFFER: dict[str, Any] = {
    "cache_formats": Set((KEY_BOUNDS,)),
    "exact": Flag(False),
    "attention_types": Set(("decoder",)),
    "dtypes": Set((("float32", "float32"), ("bfloat16", "bfloat16"))),
    **dict.fromkeys(("mla", "tree_mask", "request_trees", "kv_scales", "sliding_window"), Flag(False)),
    "limits": (),
}


def _bounded(name: str, level: Level, summary: str, factory: Callable[..., Any]) -> Mutant:
    return mutant(name, level, summary, factory, **OFFER)


L1, L3 = Level.NUMERICS, Level.STATEFUL

MUTANTS = (
    _bounded("bounds-grow", L1, "bounds never shrink", Grow),
    _bounded("bounds-of-new-keys", L1, "bounds are those of the newest key", NewAlone),
    _bounded("bounds-of-whole-block", L1, "slots behind the last key count", WholeBlock),
    _bounded("bounds-of-full-blocks", L1, "a block has no bounds until it is full", FullBlocks),
    _bounded("bounds-of-last-block", L1, "only a chunk's last block gets bounds", LastBlock),
    _bounded("bounds-one-key-less", L1, "the newest key is not in the bounds", OneLess),
    _bounded("bounds-turned", L1, "the largest numbers come first", Turned),
    _bounded("bounds-of-one-head", L1, "all KV heads have the first one's bounds", OneHead),
    _bounded("sparse-largest-only", L1, "negative elements of a query meet the largest keys", LargestOnly),
    _bounded("sparse-first-head", L1, "the first KV head chooses for all", FirstHead),
    _bounded("sparse-center", L1, "blocks are judged by the middle of their bounds", Center),
    _bounded("sparse-worst", L1, "the blocks with the smallest bounds are read", Worst),
    _bounded("sparse-newest-left-out", L1, "the newest block may be left out", NewestLeftOut),
    _bounded("sparse-when-exact", L1, "blocks are left out although all keys are asked for", AlwaysSparse),
)
CORRECT = (Correct("leaves out blocks by their bounds", offer("bounded", "by bounds", BoundedAttention, **OFFER)),)
