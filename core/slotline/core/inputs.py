"""Gathering a step's inputs from the rows.

Example: requests with 2, 5 and 3 scheduled tokens give query_start_loc [0, 2, 7, 10]; the token at index 4 belongs to
request 1, its position is that request's computed tokens plus 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, frozen

from slotline.core.cache_manager import CacheGroup
from slotline.core.rows import Rows
from slotline.core.scheduler import Schedule
from slotline.core.staging import Staging
from slotline.registry.contracts import AttentionBatch

Int = npt.NDArray[np.int64]
PAD_SLOT = -1


@define(kw_only=True, eq=False)
class StepInputs:
    """Everything a forward pass reads.

    Attributes:
        rows: [num_requests] int64, permanent rows in batch order.
        num_scheduled: [num_requests] int64.
        num_tokens: tokens without padding; `num_padded_tokens` with it.
        input_ids, positions: [num_padded_tokens] int64 on the device.
        logits_indices: [num_logits] int64 on the device, the last token of each request whose known tokens all are
            computed by this step, and each of its drafts; other requests are mid-prompt and sample nothing.
        logits_rows: [num_logits] int64, the permanent rows of those.
        draft_positions: [num_logits] int64, drafts that each assumes: 0 for the known tokens' last, 1 for the first
            draft and so on; None where nothing is drafted.
        batches: what attention sees, by cache group.
        shape: the captured shape that they are padded to, None to run eagerly.
    """

    rows: Int
    num_scheduled: Int
    num_tokens: int
    num_padded_tokens: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    logits_rows: Int
    draft_positions: Int | None
    batches: tuple[AttentionBatch, ...]
    shape: GraphShape | None


@frozen
class GraphShape:
    """A shape that graphs are captured for.

    Attributes:
        num_tokens: tokens, padding included.
        query_len: of every request where all have the same, so that whole requests are padded; 0 for a mixed batch.
    """

    num_tokens: int
    query_len: int


def even_split(num_tokens: int, num_requests: int) -> list[int]:
    """Query lengths of a made-up batch: as even as can be; they sum to `num_tokens`."""
    each, rest = divmod(num_tokens, num_requests)
    return [each] * (num_requests - rest) + [each + 1] * rest


class InputGatherer:
    """Builds `StepInputs` with array operations alone; no loop over requests or tokens."""

    def __init__(
        self,
        rows: Rows,
        groups: Sequence[CacheGroup],
        kernel_block_sizes: Sequence[int],
        staging: Staging,
        max_tokens: int,
        max_drafts: int = 0,
    ) -> None:
        self.rows = rows
        self.groups = tuple(groups)
        self.kernel_block_sizes = tuple(kernel_block_sizes)
        self.staging = staging
        # int64, so that token offsets cannot overflow: [max(tokens, requests + 1, model length)]
        self._arange = np.arange(max(max_tokens, rows.max_requests + 1, rows.max_model_len), dtype=np.int64)
        self._declare(max_tokens, max_drafts)

    def gather(self, schedule: Schedule, shape: GraphShape | None = None) -> StepInputs:
        """The inputs of a scheduled step, padded to a captured shape if given.

        A padded request has as many query tokens as the others, a sequence length of 0, and slots -1.
        """
        rows, counts, computed = schedule.rows, schedule.num_scheduled, schedule.num_computed
        seq_lens = computed + counts
        missing = shape.num_tokens // shape.query_len - len(rows) if shape and shape.query_len else 0
        tables = self._tables(
            rows, seq_lens, missing
        )  # first, so that the largest copy is under way while the rest is computed
        token_rows, positions, starts = self._expand(rows, counts, computed, schedule.num_tokens)
        input_ids = self.rows.token_ids[token_rows, positions].astype(np.int64)
        known = self.rows.num_tokens[rows]
        complete = seq_lens >= known
        logits_indices, logits_rows, draft_positions = (starts[1:] - 1)[complete], rows[complete], None
        if (drafts := (seq_lens - known)[complete]).any():
            logits_rows, draft_positions = self._with_drafts(logits_rows, drafts)
            logits_indices = np.repeat(logits_indices - drafts, drafts + 1) + draft_positions
        slots = [
            self._slots(g, k, token_rows, positions) for g, k in zip(self.groups, self.kernel_block_sizes, strict=True)
        ]
        return self._assemble(
            rows=rows,
            counts=counts,
            starts=starts,
            seq_lens=seq_lens,
            input_ids=input_ids,
            positions=positions,
            slots=slots,
            tables=tables,
            logits_indices=logits_indices,
            logits_rows=logits_rows,
            draft_positions=draft_positions,
            num_decodes=schedule.num_decodes,
            num_padded_tokens=shape.num_tokens if shape else schedule.num_tokens,
            missing=missing,
            shape=shape,
        )

    def dummy(
        self,
        query_lens: Sequence[int],
        *,
        seq_len: int | None = None,
        num_padded_tokens: int | None = None,
        vocab_size: int = 1,
    ) -> StepInputs:
        """Inputs of the given shape that write nowhere, for profiling, warm-up and capture.

        Args:
            query_lens: tokens of each made-up request.
            seq_len: tokens each pretends to have in the cache; its own query by default.
            vocab_size: token ids are drawn below it, the same in each call, so that a mixture of experts meets all
                of them; 1 gives token 0 alone.
        """
        counts = np.asarray(query_lens, np.int64)
        num_tokens = int(counts.sum())
        seq_lens = counts if seq_len is None else np.maximum(counts, seq_len)
        rows = np.zeros(len(counts), np.int64)
        _, positions, starts = self._expand(rows, counts, seq_lens - counts, num_tokens)
        width = int(seq_lens.max(initial=0))
        tables = [
            self.staging.upload(f"block_table.{i}", np.zeros((len(counts), -(-width // size)), np.int32))
            for i, size in enumerate(self.kernel_block_sizes)
        ]
        return self._assemble(
            rows=rows,
            counts=counts,
            starts=starts,
            seq_lens=seq_lens,
            input_ids=np.random.default_rng(0).integers(0, vocab_size, num_tokens),
            positions=positions,
            slots=[np.full(num_tokens, PAD_SLOT, np.int64) for _ in self.groups],
            tables=tables,
            logits_indices=starts[1:] - 1,
            logits_rows=rows,
            draft_positions=None,
            num_decodes=int((counts == 1).sum()) if (np.diff(counts) >= 0).all() else 0,
            num_padded_tokens=num_padded_tokens or num_tokens,
            missing=0,
            shape=None,
        )

    def _expand(self, rows: Int, counts: Int, computed: Int, num_tokens: int) -> tuple[Int, Int, Int]:
        """Row and position of each token [num_tokens], and query_start_loc [num_requests + 1]."""
        starts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        if num_tokens == len(counts):  # one token each
            return rows, computed, starts
        offsets = np.repeat(computed - starts[:-1], counts)
        return np.repeat(rows, counts), self._arange[:num_tokens] + offsets, starts

    def _with_drafts(self, rows: Int, drafts: Int) -> tuple[Int, Int]:
        """Each row once for its last known token and once for each draft, and the drafts that each assumes."""
        counts = drafts + 1
        ends = np.cumsum(counts)
        return np.repeat(rows, counts), np.arange(ends[-1]) - np.repeat(ends - counts, counts)

    def _slots(self, group: CacheGroup, kernel_block_size: int, token_rows: Int, positions: Int) -> Int:
        blocks, offsets = np.divmod(positions, kernel_block_size)
        slots: Int = group.table[token_rows, blocks] * np.int64(kernel_block_size) + offsets
        return slots

    def _tables(self, rows: Int, seq_lens: Int, missing: int) -> list[torch.Tensor]:
        """The block tables of the batch on the device, by cache group, as wide as its longest request needs.

        `missing` rows of null blocks follow for padded requests.
        """
        longest = int(seq_lens.max(initial=0))
        tables = []
        for index, (group, size) in enumerate(zip(self.groups, self.kernel_block_sizes, strict=True)):
            table = group.table[:, : -(-longest // size)][rows]
            table = np.pad(table, ((0, missing), (0, 0))) if missing else table
            tables.append(self.staging.upload(f"block_table.{index}", table))
        return tables

    def _assemble(
        self,
        *,
        rows: Int,
        counts: Int,
        starts: Int,
        seq_lens: Int,
        input_ids: Int,
        positions: Int,
        slots: list[Int],
        tables: list[torch.Tensor],
        logits_indices: Int,
        logits_rows: Int,
        draft_positions: Int | None,
        num_decodes: int,
        num_padded_tokens: int,
        missing: int,
        shape: GraphShape | None,
    ) -> StepInputs:
        upload, num_tokens, longest = self.staging.upload, len(input_ids), int(counts.max(initial=0))
        real = num_tokens
        if (padding := num_padded_tokens - num_tokens) > 0:
            input_ids, positions = np.pad(input_ids, (0, padding)), np.pad(positions, (0, padding))
            slots = [np.pad(s, (0, padding), constant_values=PAD_SLOT) for s in slots]
        if missing:
            more = self._arange[1 : missing + 1] * longest
            starts, seq_lens = np.concatenate([starts, starts[-1] + more]), np.pad(seq_lens, (0, missing))
            num_tokens = num_padded_tokens
            num_decodes = len(seq_lens) if longest == 1 else 0
        starts32, seq_lens32 = starts.astype(np.int32), seq_lens.astype(np.int32)
        query_start_loc = upload("query_start_loc", starts32)
        seq_lens_device = upload("seq_lens", seq_lens32)
        positions_device = upload("positions", positions)
        batches = tuple(
            AttentionBatch(
                num_requests=len(seq_lens),
                num_tokens=num_tokens,
                max_query_len=longest,
                max_seq_len=int(seq_lens.max(initial=0)),
                query_start_loc=query_start_loc,
                seq_lens=seq_lens_device,
                block_table=table,
                slot_mapping=upload(f"slot_mapping.{i}", slot),
                positions=positions_device,
                query_start_loc_cpu=starts32,
                seq_lens_cpu=seq_lens32,
                num_decodes=num_decodes,
            )
            for i, (table, slot) in enumerate(zip(tables, slots, strict=True))
        )
        return StepInputs(
            rows=rows,
            num_scheduled=counts,
            num_tokens=real,
            num_padded_tokens=num_padded_tokens,
            input_ids=upload("input_ids", input_ids),
            positions=positions_device,
            logits_indices=upload("logits_indices", logits_indices),
            logits_rows=logits_rows,
            draft_positions=draft_positions,
            batches=batches,
            shape=shape,
        )

    def _declare(self, max_tokens: int, max_drafts: int) -> None:
        requests = self.rows.max_requests
        declare = self.staging.declare
        for name in ("input_ids", "positions"):
            declare(name, (max_tokens,), np.int64)
        declare("query_start_loc", (requests + 1,), np.int32)
        declare("seq_lens", (requests,), np.int32)
        declare("logits_indices", (requests * (1 + max_drafts),), np.int64)
        for index, group in enumerate(self.groups):
            declare(f"block_table.{index}", group.table.shape, np.int32)
            declare(f"slot_mapping.{index}", (max_tokens,), np.int64)
