"""Cache specs that are wrong about counts, freeing and prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slotline.registry.contracts import BlockHash, KVSpecContext
from slotline.testing.reference.kv_spec import WindowedSpec

Lookup = Callable[[BlockHash], int | None]

# --- counts


class OneMoreAtTheEdge(WindowedSpec):
    def blocks_needed(self, num_tokens: int) -> int:
        return num_tokens // self.block_size + 1 if num_tokens else 0


class ForgetsTheBegunBlock(WindowedSpec):
    def blocks_needed(self, num_tokens: int) -> int:
        return max(num_tokens // self.block_size, min(num_tokens, 1))


class BlockForNothing(WindowedSpec):
    def blocks_needed(self, num_tokens: int) -> int:
        return max(1, super().blocks_needed(num_tokens))


class HoldsTooFew(WindowedSpec):
    def max_blocks_held(self) -> int:
        most = super().max_blocks_held()
        return most if self.window is None else min(most, self.blocks_needed(self.window))  # the window may straddle


class HoldsForever(WindowedSpec):
    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return 0

    def max_blocks_held(self) -> int:
        return self.blocks_needed(self.context.max_model_len)


# --- freeing


class FreesOneEarly(WindowedSpec):
    def blocks_freeable(self, num_computed_tokens: int) -> int:
        freeable = super().blocks_freeable(num_computed_tokens)
        return freeable + 1 if freeable else 0


class WindowWithoutTheQuery(WindowedSpec):
    def first_read(self, num_computed_tokens: int) -> int:
        return super().first_read(num_computed_tokens) + 1


class RoundsUp(WindowedSpec):
    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return -(-max(0, self.first_read(num_computed_tokens)) // self.block_size)


class TakesBackAtEdges(WindowedSpec):
    def blocks_freeable(self, num_computed_tokens: int) -> int:
        freeable = super().blocks_freeable(num_computed_tokens)
        return max(0, freeable - 1) if num_computed_tokens % self.block_size == 1 else freeable


class HighWaterMark(WindowedSpec):
    most = 0

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        self.most = max(self.most, super().blocks_freeable(num_computed_tokens))
        return self.most

    def first_kept(self, length: int) -> int:
        return super().blocks_freeable(length * self.block_size)


# --- prefixes


class SkipsHoles(WindowedSpec):
    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Lookup) -> list[int]:
        if self.window is not None:
            return super().prefix_hit(hashes, lookup)
        return [block for block in map(lookup, hashes) if block is not None]


class NullForHoles(WindowedSpec):
    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Lookup) -> list[int]:
        if self.window is not None:
            return super().prefix_hit(hashes, lookup)
        cached = [lookup(block_hash) for block_hash in hashes]
        while cached and cached[-1] is None:
            cached.pop()
        return [block or 0 for block in cached]


class OneNullTooMany(WindowedSpec):
    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Lookup) -> list[int]:
        found = super().prefix_hit(hashes, lookup)
        first = self.first_kept(len(found))
        return [0 if index == first and index < len(found) - 1 else block for index, block in enumerate(found)]


class FromTheStartOnly(WindowedSpec):
    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Lookup) -> list[int]:
        found: list[int] = []
        for block_hash in hashes:
            block = lookup(block_hash)
            if block is None:
                break
            found.append(block)
        return found


class WindowForgotInPrefix(WindowedSpec):
    def first_kept(self, length: int) -> int:
        return max(0, length - 1) if self.window is not None else 0  # only the last block, for every window


class RemembersLookups(WindowedSpec):
    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        self.known: dict[BlockHash, int] = {}

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Lookup) -> list[int]:
        for block_hash in hashes:
            block = lookup(block_hash)
            if block is not None:
                self.known.setdefault(block_hash, block)
        return super().prefix_hit(hashes, self.known.get)


class TrustsTheLastBlock(WindowedSpec):
    """Takes an earlier answer again while the chain's last block is where it was."""

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        self.answers: dict[BlockHash, list[int]] = {}

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Lookup) -> list[int]:
        old = self.answers.get(hashes[-1]) if hashes else None
        if old and lookup(hashes[-1]) == old[-1]:
            return list(old)
        found = super().prefix_hit(hashes, lookup)
        if found and len(found) == len(hashes):
            self.answers[hashes[-1]] = found
        return found


class DropsTheLastBlock(WindowedSpec):
    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Lookup) -> list[int]:
        return super().prefix_hit(hashes, lookup)[: max(0, len(hashes) - 1)]


class ThirdAnswer(WindowedSpec):
    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        self.asked: dict[int, int] = {}

    def blocks_needed(self, num_tokens: int) -> int:
        self.asked[num_tokens] = self.asked.get(num_tokens, 0) + 1
        found = super().blocks_needed(num_tokens)
        return found + 1 if self.asked[num_tokens] == 3 and num_tokens == self.block_size else found
