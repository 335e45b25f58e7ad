"""Attention of a drafter's own layers, which lie in the model's cache groups and have its requests' blocks.

What a step computed is attended over under the step's own plans. Behind it a drafter goes on by itself, one token of
each request at a time; keys and values of those are guesses, overwritten when the model has computed the places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.cache.block_pool import NULL_BLOCK
from slotline.core.cache.manager import CacheGroup
from slotline.core.execution.attention import Attend, AttentionRouter
from slotline.core.execution.staging import reserved_bytes
from slotline.registry.contracts import AttentionBatch, AttentionLayer

Int = npt.NDArray[np.int64]


class DraftAttention:
    """Plans a drafter's steps.

    Args:
        router: of all layers; `layers` the drafter's own.
        groups: all cache groups, in order; `kernel_block_sizes` theirs.
        num_tokens: draft tokens.
        device: torch device string.
    """

    def __init__(
        self,
        router: AttentionRouter,
        layers: Sequence[AttentionLayer],
        groups: Sequence[CacheGroup],
        kernel_block_sizes: Sequence[int],
        *,
        max_model_len: int,
        num_tokens: int,
        device: str,
    ) -> None:
        self._router, read = router.part(layers)
        self._groups = [(groups[index], kernel_block_sizes[index]) for index in read]
        self._max_model_len = max_model_len
        self._offsets = np.arange(num_tokens)[:, None]
        self._device = device

    def begin(self, rows: Int, positions: Int) -> Callable[[int], Attend]:
        """See `DraftBatch.attend`; rows [n] and the positions [n] of their newest tokens.

        A place that the request has no block for, or behind the model's longest sequence, is not stored.
        """
        places = positions + self._offsets  # [num_tokens, n]
        inside = np.minimum(places, self._max_model_len - 1)
        seq_lens, longest = (inside + 1).astype(np.int32), int(inside.max(initial=0)) + 1
        starts = np.arange(len(rows) + 1, dtype=np.int32)
        lens, where, starts_device = self._upload(seq_lens), self._upload(inside), self._upload(starts)
        seen = []
        for group, size in self._groups:
            table = group.table[:, : -(-longest // size)][rows]  # [n, width]
            blocks = table[np.arange(len(rows)), inside // size]  # [num_tokens, n]
            slots = blocks * np.int64(size) + inside % size
            slots[(blocks == NULL_BLOCK) | (places != inside)] = -1
            seen.append((self._upload(table), self._upload(slots)))
        return self._attend(starts, starts_device, seq_lens, lens, where, seen)

    def reserved_bytes(self, max_requests: int) -> int:
        """What `stage` uploads at most."""
        tables = sum(reserved_bytes((max_requests, group.table.shape[1]), np.int32) for group, _ in self._groups)
        return tables + reserved_bytes((max_requests + 1,), np.int32)

    def stage(
        self, rows: Int, bounds: Int, upload: Callable[[npt.NDArray[Any]], torch.Tensor]
    ) -> Callable[[torch.Tensor], Callable[[int], Attend]]:
        """What gives the same as `begin` once positions [n] are known on the device, and nowhere else.

        Args:
            rows: [n]; bounds: [n] what their positions are at most.
            upload: takes an array to the device; it is there when the result is called.
        """
        inside = np.minimum(bounds + self._offsets, self._max_model_len - 1)
        seq_lens, longest = (inside + 1).astype(np.int32), int(inside.max(initial=0)) + 1
        starts = np.arange(len(rows) + 1, dtype=np.int32)
        starts_device = upload(starts)
        tables = [upload(group.table[:, : -(-longest // size)][rows]) for group, size in self._groups]

        def begin(positions: torch.Tensor) -> Callable[[int], Attend]:
            places = positions + torch.arange(len(self._offsets), device=positions.device)[:, None]  # [num_tokens, n]
            where = places.clamp(max=self._max_model_len - 1)
            seen = []
            for table, (_, size) in zip(tables, self._groups, strict=True):
                blocks = table.gather(1, (where // size).T).T
                slots = blocks.long() * size + where % size
                seen.append((table, slots.masked_fill((blocks == NULL_BLOCK) | (places != where), -1)))
            return self._attend(starts, starts_device, seq_lens, (where + 1).int(), where, seen)

        return begin

    def _attend(
        self,
        starts: npt.NDArray[np.int32],
        starts_device: torch.Tensor,
        seq_lens: npt.NDArray[np.int32],
        lens: torch.Tensor,
        where: torch.Tensor,
        seen: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> Callable[[int], Attend]:
        """See `DraftBatch.attend`.

        Args:
            starts: [n + 1], and on the device.
            seq_lens: [num_tokens, n] by offset; `lens` on the device; `where` [num_tokens, n] the positions there.
            seen: of each cache group the table [n, width] and the slots [num_tokens, n].
        """
        count = len(starts) - 1

        def attend(offset: int) -> Attend:
            return self._router.plan(
                [
                    AttentionBatch(
                        num_requests=count,
                        num_tokens=count,
                        max_query_len=1,
                        max_seq_len=int(seq_lens[offset].max()),
                        query_start_loc=starts_device,
                        seq_lens=lens[offset],
                        block_table=table,
                        slot_mapping=slots[offset],
                        positions=where[offset],
                        query_start_loc_cpu=starts,
                        seq_lens_cpu=seq_lens[offset],
                        num_decodes=count,
                    )
                    for table, slots in seen
                ]
            )

        return attend

    def _upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
