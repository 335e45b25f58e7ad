"""A drafter for tests that attends over blocks and compares each output with dense attention over known tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import evolve

from slotline.registry import Descriptor, Kind, Max, Set
from slotline.registry.contracts import (
    AttentionLayer,
    ComputedTokens,
    Draft,
    DraftBatch,
    DrafterCapabilities,
    DrafterContext,
    DrafterInspection,
)

HEADS, SIZE, TOKENS, PLACES = 2, 8, 4096, 512


class BlockReader:
    """Keys and values are numbers of a token and its position, so that what a cache must hold is known.

    Attributes:
        errors: by how much outputs differed from dense attention, one for each block, all engines together.
        queries: the blocks to attend to: how many queries, and whether they are causal.
    """

    descriptor = Descriptor(
        kind=Kind.DRAFTER,
        name="block_reader",
        factory="",
        capabilities=DrafterCapabilities(
            devices=Set(("cpu",)),
            max_tokens=Max(),
            needs_history=True,
            needs_computed=True,
            needs_kv_group=True,
            block_attention="full",
        ),
    )
    errors: ClassVar[list[float]] = []
    queries: ClassVar[tuple[tuple[int, bool], ...]] = ((4, False), (1, False), (3, True), (4, True))
    stores: ClassVar[bool] = True

    def __init__(self, context: DrafterContext) -> None:
        generator = torch.Generator().manual_seed(0)
        self.count, self.layer = context.num_tokens, context.layers[0]
        self.dtype, self.longest = getattr(torch, context.dtype), context.max_model_len
        self.of_token = torch.randn(TOKENS, 3, HEADS, SIZE, generator=generator)
        self.of_place = torch.randn(PLACES, 3, HEADS, SIZE, generator=generator)

    @classmethod
    def attention_layers(cls, inspection: DrafterInspection) -> tuple[AttentionLayer, ...]:
        """One plain layer."""
        return (
            AttentionLayer(
                name="own", index=0, num_heads=HEADS, num_kv_heads=HEADS, head_size=SIZE, head_size_v=SIZE, scale=0.3
            ),
        )

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Keep nothing."""

    def release(self, row: int) -> None:
        """Keep nothing."""

    def states(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query, key and value [n, heads, size] of tokens."""
        found = (self.of_token[tokens % TOKENS] + self.of_place[positions]).to(self.dtype)
        return tuple(found.unbind(1))

    def observe(self, computed: ComputedTokens) -> None:
        """Store the keys and values of all tokens, without attention or with it."""
        assert computed.store is not None
        assert computed.attend is not None
        query, key, value = self.states(computed.token_ids, computed.positions)
        if self.stores:
            computed.store(self.layer, key, value)
        else:
            computed.attend(self.layer, query, key, value, None)

    def propose(self, batch: DraftBatch) -> Draft:
        """Attend, compare, and repeat the newest token."""
        assert batch.attend_block is not None
        for count, causal in self.queries:
            self.compare(batch, count, causal)
        return Draft(token_ids=batch.last_token_ids[:, None].expand(-1, self.count).contiguous())

    def compare(self, batch: DraftBatch, count: int, causal: bool) -> None:
        """Attend with the newest token and others behind it, made up."""
        assert batch.attend_block is not None
        made_up = batch.last_token_ids[:, None] + 7 * torch.arange(count)
        places = batch.positions[:, None] + torch.arange(count)
        query, key, value = self.states(made_up.flatten(), places.flatten())
        out = batch.attend_block(count, causal=causal)(self.layer, query, key, value, None)
        for i, (row, known) in enumerate(zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)):
            if known - 1 + count > self.longest:
                continue  # the last ones have no place
            own = slice(i * count, (i + 1) * count)
            history = batch.token_table[row, : known - 1].long()
            _, past_keys, past_values = self.states(history, torch.arange(known - 1))
            keys, values = torch.cat([past_keys, key[own]]).float(), torch.cat([past_values, value[own]]).float()
            scores = torch.einsum("qhd,khd->hqk", query[own].float(), keys) * 0.3
            if causal:
                later = torch.arange(len(keys)) > torch.arange(known - 1, known - 1 + count)[:, None]
                scores = scores.masked_fill(later, -torch.inf)
            wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
            type(self).errors.append((out[own].float() - wanted).abs().max().item())


class AttendsFirst(BlockReader):
    """Fills its cache by attention."""

    descriptor = evolve(BlockReader.descriptor, name="attends_first")
    stores = False


class CausalReader(BlockReader):
    """Declares causal blocks."""

    descriptor = evolve(
        BlockReader.descriptor,
        name="causal_reader",
        capabilities=evolve(BlockReader.descriptor.capabilities, block_attention="causal"),
    )
    queries = ((4, True), (2, True))


class Wrong(CausalReader):
    """Declares causal blocks and asks for others."""

    descriptor = evolve(CausalReader.descriptor, name="wrong")
    queries = ((2, False),)


class TooLarge(BlockReader):
    """Asks for a block of more tokens than its drafts and the newest one."""

    descriptor = evolve(BlockReader.descriptor, name="too_large")
    queries = ((5, False),)
