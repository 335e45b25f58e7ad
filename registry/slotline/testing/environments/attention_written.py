"""Batches over caches of an unknown format: a `World` whose earlier tokens the backend under test has written itself.

The memory is laid out by the cache spec that comes with the backend. What lies in it is known only as bytes: a new
token's bytes are those that another object of the plugin writes for it alone, in a batch of requests of one token. A
wrong write shows in the outputs that are read from it, and in blocks that no token of the step belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve

from slotline.registry.contracts.attention import AttentionBatch
from slotline.registry.contracts.kv_spec import KVSpecContext
from slotline.registry.loading import resolve_factory
from slotline.testing.check import Failed
from slotline.testing.environments.attention import World, threads
from slotline.testing.environments.attention_case import FIRST_BLOCK, NULL_BLOCK, POISON_BLOCK, Case
from slotline.testing.subject import Subject

GAP = 256
"""Bytes behind a kernel block that nobody may read or write."""
GARBAGE = 0xFF
"""Each byte of what must not be read: NaN in every floating dtype."""
TOGETHER = 256
"""Tokens that are written in one batch."""


class WrittenWorld(World):
    """World whose cache holds what the subject writes.

    Args:
        case: the case. Its cache format is that of the subject's companion.
        device: device of all tensors.
        subject: the backend, with the spec of its cache.
    """

    def __init__(self, case: Case, device: str, subject: Subject) -> None:
        self._subject, self._writers = subject, dict[int, Any]()
        super().__init__(case, device)
        self._expect_nothing_else()

    def _expect_nothing_else(self) -> None:
        """Check that the tokens before the step changed no block without a request.

        Raises:
            Failed: naming the block.
        """
        changed = (self.buffers[0][:, : self._page].cpu() != self._first_byte[:, None]).any(1)
        owned = sorted({block for own in self.owned for block in own} - {NULL_BLOCK})
        changed[torch.tensor(owned, dtype=torch.int64)] = False
        if bool(changed.any()):
            block = int(changed.nonzero()[0])
            raise Failed(f"writing single tokens changed block {block}, which holds none of them{self._owner(block)}")

    def like(self, case: Case) -> World:
        """Return a new world of another case over the subject's cache."""
        return WrittenWorld(case, str(self.device), self._subject)

    def empty_cache(self) -> tuple[list[torch.Tensor], Any]:
        """Return the memory of the kernel blocks, and the cache that the spec makes of it."""
        case, companion = self.case, self._subject.companion
        assert companion is not None  # the format is its own
        spec = resolve_factory(companion)(self._context())
        self._page = spec.page_bytes(self.layer) // case.manager_blocks
        apart = case.strided and companion.capabilities.page_stride.refusal(True) is None
        memory = torch.zeros(self.num_blocks, self._page + (GAP if apart else 0), dtype=torch.uint8, device=self.device)
        cache = spec.bind(
            memory[:, : self._page] if apart else memory.view(-1), self.layer, self.num_blocks // case.manager_blocks
        )
        owned = {block for own in self.owned for block in own} - {NULL_BLOCK}
        rows = {"null block": [NULL_BLOCK], "poison block": [POISON_BLOCK], "unused slots": sorted(owned)}
        rows["unused blocks"] = sorted(set(range(FIRST_BLOCK, self.num_blocks)) - owned)
        for place, blocks in rows.items():
            if place in case.poisoned:
                memory[torch.tensor(blocks, dtype=torch.int64, device=self.device), : self._page] = GARBAGE
        if "gaps" in case.poisoned:
            memory[:, self._page :] = GARBAGE
        self._first_byte = memory[:, 0].cpu()
        return [memory], cache

    def _context(self) -> KVSpecContext:
        context = self.case.context(str(self.device))
        return KVSpecContext(
            contract=1,
            layers=(self.layer,),
            block_size=context.block_size,
            kernel_block_size=context.kernel_block_size,
            layout=context.layout,
            kv_dtype=context.kv_dtype,
            max_model_len=context.max_model_len,
            format=context.cache_format,
        )

    def spoil(self, blocks: Sequence[int]) -> None:
        """Fill whole blocks with garbage."""
        self.buffers[0][torch.tensor(blocks, dtype=torch.int64, device=self.device), : self._page] = GARBAGE

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block."""
        self.buffers[0][target, : self._page] = self.buffers[0][source, : self._page]

    def put(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, live: bool = True) -> None:
        """Let another object of the plugin write keys and values into slots."""
        scale_k, scale_v = self.case.part_scales
        for first in range(0, len(slots), TOGETHER):
            part = slice(first, first + TOGETHER)
            key, value = (self._given(*pair) for pair in ((keys[part], scale_k), (values[part], scale_v)))
            self._write(slots[part].to(self.device), key, value)

    def _given(self, stored: torch.Tensor, scale: float) -> torch.Tensor:
        """Return what the model gives for numbers that the cache stores, as far as its dtype reaches."""
        most = torch.finfo(self.case.dtype).max
        return (stored.float() * scale).clamp(-most, most).to(self.case.dtype).to(self.device)

    @threads(1)
    def _write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        writer, batch = self._writer(), self._alone(slots)
        plan = writer.plan(batch)
        if not self._subject.capabilities.writes_cache:
            writer.write(self.layer, key, value, self.cache, plan)
            return
        query = key.repeat_interleave(self.case.num_heads // self.case.num_kv_heads, 1)
        out = torch.zeros(*query.shape[:2], self.layer.head_size_v, dtype=query.dtype, device=self.device)
        writer.forward(self.layer, query, key, value, self.cache, plan, out, self.sinks)

    def _writer(self) -> Any:
        """Return the object that writes for the layer, which serves other worlds over the same cache too."""
        index = self.layer.index
        if index not in self._writers:
            context = evolve(self.case, requests=()).context(str(self.device), layers=index + 1)
            self._writers[index] = self._subject.build(context)
        return self._writers[index]

    def _alone(self, slots: torch.Tensor) -> AttentionBatch:
        """Return a batch in which each token is a request of its own, whose only block is the token's."""
        size, count = self.case.block_size, len(slots)
        offsets = (slots % size).int()
        starts = np.arange(count + 1, dtype=np.int32)
        return AttentionBatch(
            num_requests=count,
            num_tokens=count,
            max_query_len=1,
            max_seq_len=size,
            query_start_loc=torch.from_numpy(starts.copy()).to(self.device),
            seq_lens=offsets + 1,
            block_table=(slots // size).int()[:, None].contiguous(),
            slot_mapping=slots,
            positions=offsets.long(),
            query_start_loc_cpu=starts,
            seq_lens_cpu=(offsets + 1).cpu().numpy(),
            num_decodes=count,
            causal=self.case.causal,
        )

    def expect_foreign_blocks(self, written: list[torch.Tensor], slots: torch.Tensor) -> None:
        """Check that tokens written one by one change no block but their own.

        Raises:
            Failed: naming the block.
        """
        changed = (written[0] != self.cache_bits()[0]).any(1)
        changed[torch.unique(slots[slots >= 0] // self.case.block_size).to(self.device)] = False
        if bool(changed.any()):
            block = int(changed.nonzero()[0])
            raise Failed(f"writing single tokens changed block {block}, which holds none of them{self._owner(block)}")
