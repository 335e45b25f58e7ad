"""Gathering of a step's inputs from the rows.

Example: requests with 2, 5 and 3 scheduled tokens give query_start_loc [0, 2, 7, 10]. The token at index 4 belongs to
request 1, its position is that request's computed tokens plus 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.core.batch.input_batch_cpu import InputBatchCPU, Int
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.device.transfer_buffer import TransferBuffer
from slotline.core.kv_cache.block_table import BlockTables
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.model_runner.attention_metadata_builder import AttentionMetadataBuilder
from slotline.core.model_runner.device_inputs import DeviceInputs
from slotline.registry.contracts.prefix_groups import StepPrefixes


class GatherShortcut(Protocol):
    """A way to the inputs of some steps without a gather, which an extension knows."""

    def next(
        self, schedule: SchedulerOutput, shape: GraphShape | None, prefixes: StepPrefixes | None, variant: int
    ) -> ModelInputs | None:
        """Return the inputs of a step, or None to have them gathered."""
        ...

    def keep(self, schedule: SchedulerOutput, inputs: ModelInputs, prefixes: StepPrefixes | None, variant: int) -> None:
        """Note the inputs of a step that was gathered."""
        ...


class InputPreparer:
    """Builder of `ModelInputs` that uses only array operations, without a loop over requests or tokens."""

    def __init__(
        self,
        rows: RequestTable,
        groups: Sequence[CacheGroup],
        kernel_block_sizes: Sequence[int],
        staging: TransferBuffer,
        tables: BlockTables,
        max_tokens: int,
        max_spec_tokens: int = 0,
        last_tokens: PlaceholderTokens | None = None,
        later: Sequence[DeviceInputs] = (),
        *,
        has_uncached: bool = False,
        max_fixed_len: int = 0,
        cuts_wanted: bool = False,
        extensions: Extensions = NO_EXTENSIONS,
    ) -> None:
        self.rows = rows
        self.groups = tuple(groups)
        self.kernel_block_sizes = tuple(kernel_block_sizes)
        self._has_bounds = last_tokens is not None and last_tokens.max_spec_tokens > 0
        self._arrange = extensions.arrange_spec_tokens
        self.max_fixed_len = max_fixed_len
        self.cuts_wanted = cuts_wanted
        # int64, so that token offsets cannot overflow: [max(tokens, requests + 1, model length)]
        most = max(max_tokens, rows.max_requests + 1, rows.max_model_len, rows.max_requests * max_fixed_len)
        self._arange = np.arange(most, dtype=np.int64)
        self.assembler = AttentionMetadataBuilder(
            rows,
            groups,
            kernel_block_sizes,
            (DeviceInputs(staging, tables, tuple(range(len(groups)))), *later),
            last_tokens,
            max_tokens=max_tokens,
            max_spec_tokens=max_spec_tokens,
            has_uncached=has_uncached,
            cuts_wanted=cuts_wanted,
            extensions=extensions,
        )
        found = (shortcut(self) for shortcut in extensions.gather_shortcut)
        self._shortcuts: tuple[GatherShortcut, ...] = tuple(one for one in found if one is not None)

    def gather(
        self,
        schedule: SchedulerOutput,
        shape: GraphShape | None = None,
        prefixes: StepPrefixes | None = None,
        *,
        variant: int = 0,
    ) -> ModelInputs:
        """Gather the inputs of a scheduled step, padded to a captured shape if given.

        `prefixes` are those to serve apart, None for none. `variant` is that of the
        forward pass, see `GraphShape`.

        If a step in flight verifies tokens of a request, the host knows only upper bounds. An extension corrects them
        on the device, in `prepare_inputs`, and gathers the inputs of sampling once that step was handed out, in
        `settle_step`.
        """
        for shortcut in self._shortcuts:
            if (inputs := shortcut.next(schedule, shape, prefixes, variant)) is not None:
                return inputs
        inputs = self.assembler.assemble(self.batch(schedule, prefixes, variant), shape)
        for shortcut in self._shortcuts:
            shortcut.keep(schedule, inputs, prefixes, variant)
        return inputs

    def batch(self, schedule: SchedulerOutput, prefixes: StepPrefixes | None, variant: int) -> InputBatchCPU:
        """Gather a step on the host, without shortcuts."""
        rows, counts, computed = schedule.rows, schedule.num_scheduled, schedule.num_computed
        seq_lens = computed + counts
        token_rows, positions, starts = self.expand(rows, counts, computed, schedule.num_tokens)
        known = self.rows.num_tokens[rows]
        complete = seq_lens >= known
        logits_indices, logits_rows, spec_positions = (starts[1:] - 1)[complete], rows[complete], None
        num_verified = (seq_lens - known)[complete]
        if num_verified.any():
            logits_rows, spec_positions = self._with_spec_tokens(logits_rows, num_verified)
            logits_indices = np.repeat(logits_indices - num_verified, num_verified + 1) + spec_positions
        slots = [
            self.slots(g, k, token_rows, positions)
            if g.fixed_len is None
            else self._fixed_slots(g, k, rows[computed == 0], g.fixed_len)
            for g, k in zip(self.groups, self.kernel_block_sizes, strict=True)
        ]
        host = InputBatchCPU(
            rows=rows,
            table_rows=rows,
            counts=counts,
            starts=starts,
            seq_lens=seq_lens,
            fixed_lens=self.rows.fixed_len[rows],
            input_ids=self.rows.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            slots=slots,
            logits_indices=logits_indices,
            logits_rows=logits_rows,
            num_decodes=schedule.num_decodes,
            prefixes=prefixes,
            cuts_wanted=self.cuts_wanted and not variant and not self.rows.score_prompts(rows),
            spec_positions=spec_positions,
            num_verified=None if spec_positions is None else num_verified,
            pending=self.rows.num_pending[rows] > 0 if self._has_bounds else None,
            token_rows=token_rows,
            variant=variant,
            num_tokens=schedule.num_tokens,
            batch_tokens=schedule.num_tokens,
            max_query_len=1 if schedule.num_decodes == len(rows) else int(counts.max()),
            max_seq_len=int(seq_lens.max()),
        )
        if spec_positions is not None:
            for arrange in self._arrange:
                host = arrange(host)
        return host

    def expand(self, rows: Int, counts: Int, computed: Int, num_tokens: int) -> tuple[Int, Int, Int]:
        """Return row and position of each token [num_tokens], and query_start_loc [num_requests + 1]."""
        starts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        if num_tokens == len(counts):  # one token each
            return rows, computed, starts
        offsets = np.repeat(computed - starts[:-1], counts)
        return np.repeat(rows, counts), self._arange[:num_tokens] + offsets, starts

    def _with_spec_tokens(self, rows: Int, num_verified: Int) -> tuple[Int, Int]:
        """Repeat each row for its last known token and each token to verify. Return also how many each assumes."""
        counts = num_verified + 1
        ends = np.cumsum(counts)
        return np.repeat(rows, counts), np.arange(ends[-1]) - np.repeat(ends - counts, counts)

    def slots(self, group: CacheGroup, kernel_block_size: int, token_rows: Int, positions: Int) -> Int:
        """Return the slots [n] of tokens that are at `positions` [n] in a cache group."""
        blocks, offsets = np.divmod(positions, kernel_block_size)
        slots: Int = group.table[token_rows, blocks] * np.int64(kernel_block_size) + offsets
        return slots

    def _fixed_slots(self, group: CacheGroup, kernel_block_size: int, rows: Int, fixed_len: Int) -> Int:
        """Return the slots of the fixed number of keys of `rows`, which begin in this step."""
        counts = fixed_len[rows]
        token_rows, places, _ = self.expand(rows, counts, np.zeros_like(rows), int(counts.sum()))
        return self.slots(group, kernel_block_size, token_rows, places)
