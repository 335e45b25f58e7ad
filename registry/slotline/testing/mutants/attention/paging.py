"""Mutants that read or write wrong places of the cache."""

from __future__ import annotations

import torch
from attrs import evolve

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache
from slotline.testing.check import Level
from slotline.testing.mutants.attention.making import mutant
from slotline.testing.reference.attention.backend import EagerAttention, Plan, raw

# --- reading


class EightBitBlockIds(EagerAttention):
    def blocks(self, plan: Plan, request: int, indices: torch.Tensor) -> torch.Tensor:
        return super().blocks(plan, request, indices).to(torch.int8).long()


class SixteenBitBlockIds(EagerAttention):
    def blocks(self, plan: Plan, request: int, indices: torch.Tensor) -> torch.Tensor:
        return super().blocks(plan, request, indices).to(torch.int16).long()


class BlocksInOrder(EagerAttention):
    def blocks(self, plan: Plan, request: int, indices: torch.Tensor) -> torch.Tensor:
        return super().blocks(plan, request, indices[:1] * 0) + indices


class LengthAsBlocks(EagerAttention):
    """Computes with the manager's block size where the kernel's counts."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.manager_size = context.block_size

    def blocks(self, plan: Plan, request: int, indices: torch.Tensor) -> torch.Tensor:
        return super().blocks(plan, request, indices // (self.manager_size // self.block_size))


class WholeBlocks(EagerAttention):
    """Multiplies whole blocks and masks afterwards: zero times garbage is not zero."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().gather(cache, plan, request, first, -(-length // self.block_size) * self.block_size)

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        seen = super().visible(layer, plan, num_queries, first, length)
        missing = -length % self.block_size if layer.attention_type != "encoder_only" else 0
        return torch.nn.functional.pad(seen, (0, missing))


class WholeTable(EagerAttention):
    """Reads every entry of the block table and masks afterwards."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.missing = plan.block_table.shape[1] * self.block_size - length
        return super().gather(cache, plan, request, first, length + self.missing)

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        seen = super().visible(layer, plan, num_queries, first, length)
        return seen if layer.attention_type == "encoder_only" else torch.nn.functional.pad(seen, (0, self.missing))


class ReadsOnePastTheEnd(EagerAttention):
    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().gather(cache, plan, request, first, min(length + 1, self.room(plan)))

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        seen = super().visible(layer, plan, num_queries, first, length)
        if layer.attention_type == "encoder_only" or length == self.room(plan) or length % self.block_size == 0:
            return seen
        return torch.cat([seen, seen[:, -1:]], dim=1)

    def room(self, plan: Plan) -> int:
        return plan.block_table.shape[1] * self.block_size


class NullBlockRead(EagerAttention):
    """Reads from position 0 whatever the window says, freed blocks too, and masks afterwards."""

    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        return 0


class OneBlockLess(EagerAttention):
    """A request whose length is a multiple of the block size loses its last block."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().gather(cache, plan, request, first, length)
        count = length - max(first, (length // self.block_size - 1) * self.block_size)
        if length % self.block_size == 0 and length > self.block_size:
            keys[-count:], values[-count:] = 0, 0
        return keys, values


class DenseCache(EagerAttention):
    """Takes the cache for a contiguous tensor of its own layout, whatever the strides."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().gather(KVCache(*(dense(view) for view in cache)), plan, request, first, length)


class DenseBlocks(EagerAttention):
    """Takes a page for (token, head, dim) in every layout. The distance between pages is right."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().gather(KVCache(*(token_first(view) for view in cache)), plan, request, first, length)


class KeyStridesForValues(EagerAttention):
    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().gather(KVCache(cache.key, key_strides(cache)), plan, request, first, length)


class LongTablesCut(EagerAttention):
    """Holds 32 blocks of each table."""

    def blocks(self, plan: Plan, request: int, indices: torch.Tensor) -> torch.Tensor:
        return super().blocks(plan, request, indices.clamp(max=31))


def dense(view: torch.Tensor) -> torch.Tensor:
    """Return the memory from a view's start as if it were contiguous."""
    tokens_first = [view.shape[1] * view.shape[2] * view.shape[3], view.shape[2] * view.shape[3], view.shape[3], 1]
    end = (view.shape[0] - 1) * view.stride(0) + tokens_first[0]
    tokens_first[0] = min(tokens_first[0], end)
    return view.as_strided(view.shape, tokens_first)


def token_first(view: torch.Tensor) -> torch.Tensor:
    """Return the same pages as if each were (token, head, dim)."""
    return view.as_strided(view.shape, [view.stride(0), view.shape[2] * view.shape[3], view.shape[3], 1])


def key_strides(cache: KVCache) -> torch.Tensor:
    """Return the values with the strides of the keys, as far as the memory reaches."""
    shape, strides = cache.value.shape, cache.key.stride()
    reach = cache.value.storage_offset() + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if reach >= cache.value.untyped_storage().nbytes() // cache.value.element_size():
        return cache.value * 0
    return cache.value.as_strided(shape, strides)


# --- writing


class WritesPadding(EagerAttention):
    """Slot -1 is written: it wraps around to the last slot of the cache."""

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        super().write(layer, key, value, cache, plan)
        pads = plan.slot_mapping[plan.starts[-1] :]
        for view, new in zip(cache, (key, value), strict=True):
            rows = new[plan.starts[-1] : plan.starts[-1] + len(pads)]
            self.store(view, pads[: len(rows)] % (len(view) * self.block_size), rows)


class WritesPaddingToNullBlock(EagerAttention):
    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        slots = plan.slot_mapping.clamp(min=0)[: len(key)]
        super().write(layer, key, value, cache, evolve(plan, slot_mapping=slots, starts=[*plan.starts, len(slots)]))


class WritesFirstTokens(EagerAttention):
    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        slots = torch.full_like(plan.slot_mapping, -1)
        first = [start for start, stop in zip(plan.starts, plan.starts[1:], strict=False) if start < stop]
        slots[first] = plan.slot_mapping[first]
        super().write(layer, key, value, cache, evolve(plan, slot_mapping=slots))


class WritesNextBlock(EagerAttention):
    def store(self, view: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        super().store(view, (slots + self.block_size) % (len(view) * self.block_size), new)


class WritesNextSlot(EagerAttention):
    """Stores the new tokens one slot late within their block."""

    def store(self, view: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        offset = slots % self.block_size
        super().store(view, slots - offset + (offset + 1) % self.block_size, new)


class WritesDense(EagerAttention):
    def store(self, view: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        super().store(token_first(view), slots, new)


class WritesValuesByKeyWidth(EagerAttention):
    """Finds a token's new values by the width of its keys."""

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        row = torch.arange(value[0].numel(), device=value.device)
        place = torch.arange(len(value), device=value.device)[:, None] * key[0].numel() + row  # [T, Hkv * Dv]
        wrong = value.flatten()[place % value.numel()].view_as(value)
        super().write(layer, key, wrong, cache, plan)


class StoresAsBFloat16(EagerAttention):
    """Rounds what it stores to bfloat16, whatever the cache's dtype."""

    def store(self, view: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        super().store(view, slots, new.bfloat16())


class WritesByPosition(EagerAttention):
    """Finds slots through the block table and forgets that a request may start after a prefix."""

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        slots = plan.slot_mapping.clone()
        for request, (start, stop) in enumerate(zip(plan.starts, plan.starts[1:], strict=False)):
            if start < stop and plan.lengths[request] == stop - start:
                continue
            positions = torch.arange(stop - start, device=slots.device)
            blocks = self.blocks(plan, request, positions // self.block_size)
            slots[start:stop] = blocks * self.block_size + positions % self.block_size
        super().write(layer, key, value, cache, evolve(plan, slot_mapping=slots))


class ForwardWrites(EagerAttention):
    """Zeroes the rest of each request's last block on the way, to be safe from garbage."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().gather(cache, plan, request, first, length)
        if length % self.block_size:
            block = self.blocks(plan, request, torch.tensor([length // self.block_size], device=cache.key.device))
            for view in cache:
                raw(view)[block, length % self.block_size :] = 0
        return found


class WriteZeroesBlock(EagerAttention):
    """Clears a block before it stores the first token in it, and the null block with each step."""

    def store(self, view: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        raw(view)[0] = 0
        super().store(view, slots, new)


class TableRowsCompacted(EagerAttention):
    """Sorts requests without new tokens to the end of the block table, and only there."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        idle = [start == stop for start, stop in zip(plan.starts, plan.starts[1:], strict=False)]
        rows = sorted(range(len(idle)), key=idle.__getitem__)
        return evolve(plan, block_table=batch.block_table[torch.tensor(rows, dtype=torch.int64)])


L1, L2 = Level.NUMERICS, Level.HOSTILE

MUTANTS = (
    mutant("block-ids-of-8-bits", L1, "block ids above 127 wrap around", EightBitBlockIds),
    mutant("block-ids-of-16-bits", L2, "block ids above 32767 wrap around", SixteenBitBlockIds),
    mutant("blocks-in-order", L2, "a request's blocks are taken to be neighbours", BlocksInOrder),
    mutant("manager-block-size", L2, "the manager's block size is used for the kernel's", LengthAsBlocks),
    mutant("whole-blocks-read", L1, "slots past a request's length are read", WholeBlocks),
    mutant("whole-table-read", L1, "table entries past a request's last block are read", WholeTable),
    mutant("one-past-the-end", L1, "one slot past the length is seen", ReadsOnePastTheEnd),
    mutant("null-block-read", L2, "the null block of freed positions is read", NullBlockRead),
    mutant("last-full-block-lost", L1, "a last block that is full is lost", OneBlockLess),
    mutant("cache-taken-as-dense", L1, "the strides of the cache are ignored", DenseCache),
    mutant("page-taken-as-nhd", L1, "a page is read as (token, head, dim) in any layout", DenseBlocks),
    mutant("values-by-key-strides", L1, "values are read with the strides of keys", KeyStridesForValues),
    mutant("long-tables-cut", L1, "block tables end at 32 entries", LongTablesCut),
    mutant("padding-written", L2, "slot -1 is written, to the last slot", WritesPadding),
    mutant("padding-written-to-null-block", L2, "slot -1 is written, to slot 0", WritesPaddingToNullBlock),
    mutant("first-tokens-written", L1, "of several new tokens the first alone is stored", WritesFirstTokens),
    mutant("written-a-block-late", L1, "new tokens go to the next block", WritesNextBlock),
    mutant("written-a-slot-late", L1, "new tokens go to the next slot of their block", WritesNextSlot),
    mutant("page-written-as-nhd", L1, "a page is written as (token, head, dim) in any layout", WritesDense),
    mutant("values-written-by-key-width", L1, "values are stored with the width of keys", WritesValuesByKeyWidth),
    mutant("stored-as-bfloat16", L1, "what is stored is rounded to bfloat16", StoresAsBFloat16),
    mutant("written-by-position", L1, "slots are computed without the prefix", WritesByPosition),
    mutant("forward-clears-slots", L2, "forward clears the slots after a request's last token", ForwardWrites),
    mutant("null-block-cleared", L2, "write clears the null block", WriteZeroesBlock),
    mutant("table-rows-compacted", L1, "requests without tokens shift the rows of the table", TableRowsCompacted),
)
