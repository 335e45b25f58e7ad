"""A step's inputs on their way to the devices: one upload, and the batches that attention and states see of it.

What has the sizes of a captured shape is uploaded first and in one order, so that it has the same address in each step
of that shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve

from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.fast_prefill_batch import FastPrefillBatch
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.core.batch.input_batch_cpu import PAD_SLOT, InputBatchCPU, Int32
from slotline.core.batch.logprobs import ScoredPlaces
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.sampling_metadata import PACKED_WIDTH, SamplingMetadata
from slotline.core.device.transfer_buffer import reserved_bytes
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.model_runner.device_inputs import DeviceInputs, UploadedInputs
from slotline.registry.contracts import AttentionBatch
from slotline.registry.contracts.prefix_groups import most_packed


class AttentionMetadataBuilder:
    """Builder of `ModelInputs` from `InputBatchCPU`, with the uploads to the devices.

    Args:
        feeds: to each device that runs a part of the model.
        max_tokens, max_spec_tokens: of a step, and most tokens of a request that it verifies.
        has_uncached: whether layers keep nothing.
        cuts_wanted: whether the model may leave out tokens that are not wanted in its last layers.
        extensions: whose `gather` adds arrays to a step.

    Attributes:
        num_assembled: steps so far. Each takes the place of the one before on the devices.
    """

    def __init__(
        self,
        rows: RequestTable,
        groups: Sequence[CacheGroup],
        kernel_block_sizes: Sequence[int],
        feeds: Sequence[DeviceInputs],
        last_tokens: PlaceholderTokens | None,
        *,
        max_tokens: int,
        max_spec_tokens: int,
        has_uncached: bool,
        cuts_wanted: bool,
        extensions: Extensions = NO_EXTENSIONS,
    ) -> None:
        captured = {name for name, _ in extensions.captured_inputs}
        self._gather = [(name, gather) for name, gather in extensions.gather if name not in captured]
        self._gather_captured = [(name, gather) for name, gather in extensions.gather if name in captured]
        self.feeds = tuple(feeds)
        self._rows = rows
        self._groups = tuple(groups)
        self._kernel_block_sizes = tuple(kernel_block_sizes)
        self._fixed_groups = tuple(i for i, group in enumerate(groups) if group.fixed_len is not None)
        self._last_tokens = last_tokens
        self._has_uncached = has_uncached
        self.num_assembled = 0
        self._reserve(max_tokens, max_spec_tokens, extensions, cuts_wanted=cuts_wanted)

    def _reserve(self, max_tokens: int, max_spec_tokens: int, extensions: Extensions, *, cuts_wanted: bool) -> None:
        """Make room for the largest step."""
        requests = self._rows.max_requests
        logits = requests * (1 + max_spec_tokens)
        by_token = reserved_bytes((max(max_tokens, logits),), np.int64)
        by_request = reserved_bytes((requests + 1,), np.int64)
        by_group = len(self._groups) * reserved_bytes((most_packed(requests, max_tokens),), np.int32)
        by_fixed = sum(
            reserved_bytes((requests * self._groups[i].table.shape[1] * self._kernel_block_sizes[i],), np.int64)
            for i in self._fixed_groups
        )
        by_logits = reserved_bytes((logits,), np.int64)
        packed = reserved_bytes((logits, PACKED_WIDTH), np.int32)
        further = sum(count(max(max_tokens, logits)) for count in extensions.staging_bytes)
        for feed in self.feeds:
            by_feed = (2 + len(feed.cache_groups)) * by_token + by_group
            feed.staging.reserve(
                by_feed
                + (2 + bool(self._fixed_groups) + cuts_wanted) * by_request
                + by_fixed
                + 3 * by_logits
                + packed
                + further
                + feed.tables.num_bytes
            )

    def mark(self) -> None:
        """Mark that all copies of the step's inputs, plans included, have started. The next step waits for them."""
        for feed in self.feeds:
            feed.staging.mark()

    def assemble(self, host: InputBatchCPU, shape: GraphShape | None) -> ModelInputs:
        """Pad to the shape, if there is one, and upload."""
        self.num_assembled += 1
        host = host if shape is None else host.pad(shape, null_row=self._rows.max_requests)
        positions, seq_lens = host.positions, host.seq_lens32
        if host.pending is not None:  # on a CPU an upload is a view, which the device would change
            positions, seq_lens = positions.copy(), seq_lens.copy()
        fixed_lens = (host.fixed_lens if self._fixed_groups else host.fixed_lens[:0]).astype(np.int32)
        first, last = self.feeds[0].staging, self.feeds[-1].staging
        for feed in self.feeds:
            feed.staging.begin()
        input_ids = first.upload(host.input_ids)
        sent = [
            feed.send(positions, host.slots, host.starts32, seq_lens, fixed_lens, host.prefixes) for feed in self.feeds
        ]
        extras: dict[str, Any] = {}
        for name, gather in self._gather_captured:
            extras[name] = gather(host, first.upload)
        for feed in self.feeds:  # the last input of graphs, since its length depends on the changes in the tables
            feed.tables.stage(host.table_rows)
        logits_indices = last.upload(host.logits_indices)
        for name, gather in self._gather:
            extras[name] = gather(host, first.upload)
        last_tokens = None if host.pending is not None else self._last_tokens
        stand_ins = None if last_tokens is None else first.upload(last_tokens.stand_ins(host.logits_rows))
        sampling, params = self._sampling(host)
        num_logprobs = self._rows.num_logprobs[host.logits_rows]
        scored = ScoredPlaces.of(num_logprobs, last.upload) if num_logprobs.max(initial=-1) >= 0 else None
        wanted = None
        if host.cuts_wanted and shape is None and len(host.logits_indices) < host.num_tokens:
            wanted = FastPrefillBatch.of(host.starts, host.logits_indices, logits_indices, last.upload)
        for feed in self.feeds:
            feed.staging.flush()
        return ModelInputs(
            rows=host.rows,
            num_scheduled=host.counts,
            num_tokens=host.num_tokens,
            num_padded_tokens=len(host.input_ids),
            input_ids=input_ids,
            positions=sent[0].positions,
            logits_indices=logits_indices,
            logits_indices_cpu=host.logits_indices,
            logits_rows=host.logits_rows,
            query_start_loc=sent[-1].query_start_loc,
            query_start_loc_cpu=host.starts32,
            seq_lens_cpu=host.seq_lens32,
            batches=self._batches(host, sent, fixed_lens),
            shape=shape,
            stand_ins=stand_ins,
            sampling=sampling,
            sampling_params=params,
            scored=scored,
            wanted=wanted,
            pending=host.pending,
            spec_positions=host.spec_positions,
            spec_paths=host.spec_paths,
            num_verified=host.num_verified,
            extras=extras,
            made_up=host.made_up,
        )

    def _sampling(self, host: InputBatchCPU) -> tuple[SamplingMetadata, torch.Tensor | None]:
        """Build the sampling parameters of the logits' rows, packed on the device if needed.

        Those of upper bounds are not, see `InputPreparer.gather`.
        """
        batch = SamplingMetadata.gather(self._rows, host.logits_rows, host.spec_positions)
        packs = not batch.all_greedy and host.pending is None
        return batch, self.feeds[-1].staging.upload(batch.packed()) if packs else None

    def _batches(
        self, host: InputBatchCPU, sent: Sequence[UploadedInputs], fixed_lens: Int32
    ) -> tuple[AttentionBatch, ...]:
        """Build the attention batches, by stage and cache group, then that of layers without a cache, if there are."""
        prefixes, tables = host.prefixes, [feed.tables.take(host.max_seq_len) for feed in self.feeds]
        batches = tuple(
            self._of_group(
                group,
                there,
                fixed_lens,
                AttentionBatch(
                    num_requests=len(host.seq_lens),
                    num_tokens=host.batch_tokens,
                    max_query_len=host.max_query_len,
                    max_seq_len=host.max_seq_len,
                    query_start_loc=there.query_start_loc,
                    seq_lens=there.seq_lens,
                    block_table=table,
                    slot_mapping=slot_mapping,
                    positions=there.positions,
                    query_start_loc_cpu=host.starts32,
                    seq_lens_cpu=host.seq_lens32,
                    num_decodes=host.num_decodes,
                    **({} if prefixes is None else prefixes.fields(group, there.prefixes)),
                ),
            )
            for feed, there, taken in zip(self.feeds, sent, tables, strict=True)
            for group, table, slot_mapping in zip(feed.cache_groups, taken, there.slot_mappings, strict=True)
        )
        return (*batches, _uncached(host, sent[0])) if self._has_uncached else batches

    def _of_group(self, group: int, sent: UploadedInputs, fixed_lens: Int32, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch as the cache group sees it: with the fixed number of keys if the group has one."""
        if group not in self._fixed_groups:
            return batch
        return evolve(
            batch,
            max_seq_len=int(fixed_lens.max(initial=0)),
            seq_lens=sent.fixed_lens,
            seq_lens_cpu=fixed_lens,
            causal=False,
        )


def _uncached(host: InputBatchCPU, sent: UploadedInputs) -> AttentionBatch:
    """Build the batch of layers without a cache: a request's keys are its tokens of this step, and all see all."""
    device, requests, tokens = sent.positions.device, len(host.seq_lens), host.batch_tokens
    return AttentionBatch(
        num_requests=requests,
        num_tokens=tokens,
        max_query_len=host.max_seq_len,
        max_seq_len=host.max_seq_len,
        query_start_loc=sent.query_start_loc,
        seq_lens=sent.seq_lens,
        block_table=torch.empty((requests, 0), dtype=torch.int32, device=device),
        slot_mapping=torch.full((tokens,), PAD_SLOT, dtype=torch.int64, device=device),
        positions=sent.positions,
        query_start_loc_cpu=host.starts32,
        seq_lens_cpu=host.seq_lens32,
        causal=False,
    )
