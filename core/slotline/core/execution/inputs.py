"""Gathering a step's inputs from the rows.

Example: requests with 2, 5 and 3 scheduled tokens give query_start_loc [0, 2, 7, 10]; the token at index 4 belongs to
request 1, its position is that request's computed tokens plus 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, evolve, frozen

from slotline.core.cache.block_tables import BlockTables
from slotline.core.cache.manager import CacheGroup
from slotline.core.drafting.tree import DraftTree
from slotline.core.drafting.verification import PLACE_WIDTH, Rejections, drafted
from slotline.core.execution.encoding import Embeds
from slotline.core.execution.feeds import Feed, Sent
from slotline.core.execution.staging import Staging, reserved_bytes
from slotline.core.execution.wanted_tokens import WantedTokens
from slotline.core.sampling.batch import PACKED_WIDTH, SamplingBatch
from slotline.core.sampling.last_tokens import LastTokens
from slotline.core.sampling.logprobs import ScoredPlaces
from slotline.core.scheduling.rows import Rows
from slotline.core.scheduling.scheduler import Schedule
from slotline.registry.contracts import AttentionBatch, StateBatch, TreeMask

Int = npt.NDArray[np.int64]
PAD_SLOT = -1


@define(kw_only=True, eq=False)
class StepInputs:
    """Everything a forward pass reads.

    Attributes:
        rows: [num_requests] int64, permanent rows in batch order.
        num_scheduled: [num_requests] int64.
        pending: [num_requests] bool, requests whose drafts are verified by a step in flight: what the host says of
            their lengths and places is an upper bound; None where all is exact.
        num_tokens: tokens without padding; `num_padded_tokens` with it.
        input_ids, positions: [num_padded_tokens] int64 on the device; over several stages on the first one's.
        logits_indices: [num_logits] int64 on the device, over several stages on the last one's: the last token of each
            request whose known tokens all are computed by this step, and each of its drafts; other requests are
            mid-prompt and sample nothing.
        logits_rows: [num_logits] int64, the permanent rows of those.
        draft_positions: [num_logits] int64, drafts that each assumes: 0 for the known tokens' last, 1 for the first
            draft and so on; None where nothing is drafted.
        draft_nodes: [num_logits] int64, 0 for the known tokens' last, then 1 + the node of the tree that each stands
            behind; the same as `draft_positions` for a chain.
        tree: the form of the drafts, None for chains.
        drafts: [num_logits] int64, the draft that each judges, -1 behind a request's last; None as before.
        rejections: which of them rejection sampling decides; None for none.
        query_start_loc: [num_requests + 1] int32 on the last stage's device, padded requests included;
            `query_start_loc_cpu` and `seq_lens_cpu` [num_requests] int32 on the host.
        batches: what attention sees, by cache group; then for each later stage those of the cache groups it reads; then
            what layers without a cache see, where the model has such.
        wanted_batches: of the same cache groups, what attention sees of the `logits_indices` alone, where the model
            runs its last layers for these alone; else empty.
        states: what state layers see, where the model has any.
        shape: the captured shape that they are padded to, None to run eagerly.
        stand_ins: [num_logits] int64 on the device of `input_ids`, what stands for the tokens that are about to be
            sampled where the next step is prepared before they are known; else None.
        sampling: the sampling parameters of the logits' rows.
        sampling_params: the same, [num_logits, PACKED_WIDTH] int32 on the device of `logits_indices`; None where all
            rows are greedy.
        scored: which of the logits' rows want log-probabilities; None for none.
        embeds: embeddings of inputs besides text among the tokens; never with a shape.
        following: those among the tokens that follow each, where a drafter looks at these.
        encoder_states: [n, hidden_size], what cross-attention makes the keys of that it stores in this step; None for
            none.
        lora_slots: [num_padded_tokens] int64 on the device, the slot of each token's adapter, -1 for none; None where
            the step runs without adapters.
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
    draft_nodes: Int | None
    tree: DraftTree | None
    drafts: Int | None
    rejections: Rejections | None
    query_start_loc: torch.Tensor
    query_start_loc_cpu: npt.NDArray[np.int32]
    seq_lens_cpu: npt.NDArray[np.int32]
    batches: tuple[AttentionBatch, ...]
    states: StateBatch | None
    shape: GraphShape | None
    stand_ins: torch.Tensor | None
    sampling: SamplingBatch
    sampling_params: torch.Tensor | None
    scored: ScoredPlaces | None
    embeds: Embeds | None = None
    following: Embeds | None = None
    encoder_states: torch.Tensor | None = None
    lora_slots: torch.Tensor | None = None
    wanted_batches: tuple[AttentionBatch, ...] = ()
    pending: npt.NDArray[np.bool_] | None = None


@frozen
class GraphShape:
    """A shape that graphs are captured for.

    Attributes:
        num_tokens: tokens, padding included.
        query_len: of every request where all have the same, so that whole requests are padded; 0 for a mixed batch.
        num_requests: of a mixed batch whose attention is captured too, requests without query tokens included; 0
            where attention runs between the graphs and takes any number.
        cascade: whether the batch has a common prefix that is served apart.
        adapters: whether it is captured with adapters.
    """

    num_tokens: int
    query_len: int
    num_requests: int = 0
    cascade: bool = False
    adapters: bool = False

    @property
    def padded_requests(self) -> int:
        """Requests that a batch of this shape is padded to; 0 for any number."""
        return self.num_tokens // self.query_len if self.query_len else self.num_requests


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
        tables: BlockTables,
        max_tokens: int,
        max_drafts: int = 0,
        last_tokens: LastTokens | None = None,
        later: Sequence[Feed] = (),
        *,
        has_states: bool = False,
        lora_slots: int = 0,
        has_uncached: bool = False,
        max_encoder_len: int = 0,
        fast_prefill: bool = False,
    ) -> None:
        self.rows = rows
        self.groups = tuple(groups)
        self.kernel_block_sizes = tuple(kernel_block_sizes)
        self.feeds = (Feed(staging, tables, tuple(range(len(groups)))), *later)
        self.last_tokens = last_tokens
        self._overlaps_drafts = last_tokens is not None and last_tokens.max_drafts > 0
        self.has_states = has_states
        self.lora_slots = lora_slots
        self.has_uncached = has_uncached
        self.max_encoder_len = max_encoder_len
        self.fast_prefill = fast_prefill
        # int64, so that token offsets cannot overflow: [max(tokens, requests + 1, model length)]
        most = max(max_tokens, rows.max_requests + 1, rows.max_model_len, rows.max_requests * max_encoder_len)
        self._arange = np.arange(most, dtype=np.int64)
        by_token = reserved_bytes((max(max_tokens, rows.max_requests * (1 + max_drafts)),), np.int64)
        by_request = reserved_bytes((rows.max_requests + 1,), np.int64)
        by_group = reserved_bytes((len(groups),), np.int32)
        self._encoder_groups = tuple(i for i, group in enumerate(groups) if group.encoder_len is not None)
        by_encoder = sum(
            reserved_bytes((rows.max_requests * groups[i].table.shape[1] * kernel_block_sizes[i],), np.int64)
            for i in self._encoder_groups
        )
        by_logits = reserved_bytes((rows.max_requests * (1 + max_drafts),), np.int64)
        packed = reserved_bytes((rows.max_requests * (1 + max_drafts), PACKED_WIDTH), np.int32)
        packed += reserved_bytes((max_drafts, max_drafts), np.bool_) + reserved_bytes((max_drafts,), np.int64)  # a tree
        packed += reserved_bytes((rows.max_requests * max_drafts, PLACE_WIDTH), np.int64)
        for feed in self.feeds:
            by_feed = (2 + len(feed.cache_groups)) * by_token + by_group
            feed.staging.reserve(
                by_feed
                + bool(lora_slots) * by_token
                + (2 + 3 * has_states + bool(self._encoder_groups) + fast_prefill) * by_request
                + by_encoder
                + 3 * by_logits
                + (by_request + by_token if self._overlaps_drafts else 0)
                + packed
                + feed.tables.num_bytes
            )

    def gather(
        self,
        schedule: Schedule,
        shape: GraphShape | None = None,
        prefixes: Sequence[int] = (),
        *,
        adapters: bool = False,
    ) -> StepInputs:
        """The inputs of a scheduled step, padded to a captured shape if given.

        A padded request has as many query tokens as the others, none in a mixed batch; a sequence length of 0, and
        slots -1. `prefixes` are the common prefixes to serve apart, by cache group; empty for none. `adapters` tells
        whether the step runs with adapters.

        Where a step in flight verifies drafts of a request, the host knows upper bounds alone. The device takes off
        what fell, in place; what sampling reads is gathered once that step was handed out (`drafting/overlap.py`).
        """
        rows, counts, computed = schedule.rows, schedule.num_scheduled, schedule.num_computed
        seq_lens = computed + counts
        token_rows, positions, starts = self._expand(rows, counts, computed, schedule.num_tokens)
        known = self.rows.num_tokens[rows]
        complete = seq_lens >= known
        logits_indices, logits_rows, draft_nodes = (starts[1:] - 1)[complete], rows[complete], None
        if (drafts := (seq_lens - known)[complete]).any():
            logits_rows, draft_nodes = self._with_drafts(logits_rows, drafts)
            logits_indices = np.repeat(logits_indices - drafts, drafts + 1) + draft_nodes
        places = positions  # in the cache; nodes of a tree share positions, not places
        slots = [
            self._slots(g, k, token_rows, places)
            if g.encoder_len is None
            else self._encoder_slots(g, k, rows[computed == 0], g.encoder_len)
            for g, k in zip(self.groups, self.kernel_block_sizes, strict=True)
        ]
        num_nodes = None
        if draft_nodes is not None and (tree := self.rows.tree) is not None:
            num_nodes = np.maximum(seq_lens - known, 0)
            nodes = places - self.rows.num_tokens[token_rows]
            positions = np.where(nodes < 0, places, places - nodes + tree.depths[np.maximum(nodes, 0)] - 1)
        return self._assemble(
            rows=rows,
            table_rows=rows,
            state_slots=rows,
            counts=counts,
            starts=starts,
            seq_lens=seq_lens,
            encoder_lens=self.rows.encoder_len[rows],
            input_ids=self.rows.token_ids[token_rows, places].astype(np.int64),
            positions=positions,
            slots=slots,
            logits_indices=logits_indices,
            logits_rows=logits_rows,
            draft_nodes=draft_nodes,
            num_nodes=num_nodes,
            num_decodes=schedule.num_decodes,
            shape=shape,
            prefixes=prefixes,
            lora_slots=self.rows.lora_slot[token_rows] if adapters else None,
            fast_prefill=self.fast_prefill and not adapters and not self.rows.score_prompts(rows),
            pending=self.rows.num_pending[rows] > 0 if self._overlaps_drafts else None,
        )

    def dummy(
        self,
        query_lens: Sequence[int],
        *,
        seq_len: int | None = None,
        vocab_size: int = 1,
        shape: GraphShape | None = None,
        prefixes: Sequence[int] = (),
        adapters: bool = False,
        beginning: bool = False,
    ) -> StepInputs:
        """Inputs of the given shape that write to no block, for profiling, warm-up and capture.

        State layers write the first slots, so that their work is measured too: no request may live then.

        Args:
            query_lens: tokens of each made-up request.
            seq_len: tokens each pretends to have in the cache; its own query by default.
            vocab_size: token ids are drawn below it, the same in each call, so that a mixture of experts meets all
                of them; 1 gives token 0 alone.
            shape, prefixes: as in `gather`.
            adapters: whether tokens use adapters, one slot after the other, whatever these hold.
            beginning: whether all requests begin, so that cross-attention is given as many keys as there can be.
        """
        counts = np.asarray(query_lens, np.int64)
        num_tokens = int(counts.sum())
        seq_lens = counts if seq_len is None else np.maximum(counts, seq_len)
        rows = np.zeros(len(counts), np.int64)
        num_keys = len(counts) * self.max_encoder_len if beginning else 0
        mixed = shape is not None and shape.num_requests > 0
        _, positions, starts = self._expand(rows, counts, seq_lens - counts, num_tokens)
        return self._assemble(
            rows=rows,
            table_rows=np.full(len(counts), self.rows.max_requests),
            state_slots=self._arange[: len(counts)],
            counts=counts,
            starts=starts,
            seq_lens=seq_lens,
            encoder_lens=np.full(len(counts), self.max_encoder_len),
            input_ids=np.random.default_rng(0).integers(0, vocab_size, num_tokens),
            positions=positions,
            slots=[np.full(num_tokens if g.encoder_len is None else num_keys, PAD_SLOT, np.int64) for g in self.groups],
            logits_indices=starts[1:] - 1,
            logits_rows=rows,
            draft_nodes=None,
            num_nodes=None,
            num_decodes=int((counts == 1).sum()) if not mixed and (np.diff(counts) >= 0).all() else 0,
            shape=shape,
            prefixes=prefixes,
            lora_slots=self._arange[:num_tokens] % self.lora_slots if adapters else None,
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

    def _encoder_slots(self, group: CacheGroup, kernel_block_size: int, rows: Int, encoder_len: Int) -> Int:
        """The slots of all the encoder's tokens of `rows`, which begin in this step."""
        counts = encoder_len[rows]
        token_rows, places, _ = self._expand(rows, counts, np.zeros_like(rows), int(counts.sum()))
        return self._slots(group, kernel_block_size, token_rows, places)

    def _assemble(
        self,
        *,
        rows: Int,
        table_rows: Int,
        state_slots: Int,
        counts: Int,
        starts: Int,
        seq_lens: Int,
        encoder_lens: Int,
        input_ids: Int,
        positions: Int,
        slots: list[Int],
        logits_indices: Int,
        logits_rows: Int,
        draft_nodes: Int | None,
        num_nodes: Int | None,
        num_decodes: int,
        shape: GraphShape | None,
        prefixes: Sequence[int],
        lora_slots: Int | None,
        fast_prefill: bool = False,
        pending: npt.NDArray[np.bool_] | None = None,
    ) -> StepInputs:
        """Pad, and upload: first what has the shape's sizes, so that it has the same address in each of its steps."""
        num_tokens, longest = len(input_ids), int(counts.max(initial=0))
        longest_sequence = int(seq_lens.max(initial=0))
        batch_tokens = num_tokens
        num_padded_tokens = shape.num_tokens if shape else num_tokens
        if (padding := num_padded_tokens - num_tokens) > 0:
            input_ids, positions = np.pad(input_ids, (0, padding)), np.pad(positions, (0, padding))
            slots = [np.pad(s, (0, padding), constant_values=PAD_SLOT) for s in slots]
            lora_slots = None if lora_slots is None else np.pad(lora_slots, (0, padding), constant_values=PAD_SLOT)
        missing = max(0, shape.padded_requests - len(rows)) if shape else 0
        if missing and shape:
            more = self._arange[1 : missing + 1] * shape.query_len
            starts, seq_lens = np.concatenate([starts, starts[-1] + more]), np.pad(seq_lens, (0, missing))
            table_rows = np.pad(table_rows, (0, missing), constant_values=self.rows.max_requests)
            if shape.query_len:
                batch_tokens = num_padded_tokens
                num_decodes = len(seq_lens) if longest == 1 else 0
        starts32, seq_lens32 = starts.astype(np.int32), seq_lens.astype(np.int32)
        sent_lens = seq_lens32
        if pending is not None:  # on a CPU what is sent is a view, and the device changes it
            positions, sent_lens = positions.copy(), seq_lens32.copy()
        encoder_lens32 = (encoder_lens if self._encoder_groups else encoder_lens[:0]).astype(np.int32)
        first, last = self.feeds[0].staging, self.feeds[-1].staging
        for feed in self.feeds:
            feed.staging.begin()
        input_ids_device = first.upload(input_ids)
        sent = [feed.send(positions, slots, starts32, sent_lens, encoder_lens32, prefixes) for feed in self.feeds]
        states = None
        if self.has_states:
            pad = (0, missing)  # padded requests have no slot
            accepted = self.rows.num_accepted[rows].astype(np.int32)
            if pending is not None:
                accepted = np.where(pending, self.rows.num_pending[rows], accepted).astype(np.int32)
            states = StateBatch(
                num_requests=len(rows),
                num_tokens=num_tokens,
                max_query_len=longest,
                query_start_loc=sent[0].query_start_loc,
                slots=first.upload(np.pad(state_slots.astype(np.int32), pad, constant_values=PAD_SLOT)),
                has_initial_state=first.upload(np.pad(seq_lens[: len(rows)] > counts, pad)),
                num_accepted=first.upload(np.pad(accepted, pad, constant_values=1)),
                query_start_loc_cpu=starts32[: len(rows) + 1],
                num_decodes=min(num_decodes, len(rows)),
            )
        for feed in self.feeds:  # last of what graphs read: as long as what changed in the tables
            feed.tables.stage(table_rows)
        logits_indices_device = last.upload(logits_indices)
        lora_slots_device = None if lora_slots is None else first.upload(lora_slots)
        bounded = None
        if pending is not None and pending.any():
            bounded = self._stage_bounds(rows, counts, pending, len(seq_lens), num_padded_tokens)
        stand_ins = None
        if self.last_tokens is not None and pending is None:
            stand_ins = first.upload(self.last_tokens.stand_ins(logits_rows))
        tree = None if num_nodes is None else self.rows.tree
        draft_positions = draft_nodes if tree is None or draft_nodes is None else tree.positions(draft_nodes)
        batch = SamplingBatch.gather(self.rows, logits_rows, draft_positions)
        params = None if batch.all_greedy or pending is not None else last.upload(batch.packed())
        drafts = rejections = mask = None
        if pending is not None:
            pass  # drafts are on the device
        elif tree is not None and draft_nodes is not None:
            drafts = self.rows.token_ids[logits_rows, self.rows.num_tokens[logits_rows] + draft_nodes - 1]
            nodes32 = np.zeros(0, np.int32) if num_nodes is None else num_nodes.astype(np.int32)
            mask = TreeMask(last.upload(tree.sees), last.upload(tree.depths - 1), nodes32)
        elif draft_positions is not None:
            drafts = drafted(self.rows, logits_rows, draft_positions)
            rejections = Rejections.gather(self.rows, batch, draft_positions, drafts, last.upload)
        scored = ScoredPlaces.of(self.rows.num_logprobs[logits_rows], last.upload)
        wanted = None
        if fast_prefill and shape is None and len(logits_indices) < num_tokens:
            wanted = WantedTokens.of(starts, logits_indices, logits_indices_device, last.upload)
        for feed in self.feeds:
            feed.staging.flush()
        tables = [feed.tables.take(longest_sequence) for feed in self.feeds]
        if bounded is not None:
            self._take_off(sent[0], tables[0], states, *bounded)
        batches = tuple(
            self._of_group(
                group,
                there,
                encoder_lens32,
                AttentionBatch(
                    num_requests=len(seq_lens),
                    num_tokens=batch_tokens,
                    max_query_len=longest,
                    max_seq_len=longest_sequence,
                    query_start_loc=there.query_start_loc,
                    seq_lens=there.seq_lens,
                    block_table=table,
                    slot_mapping=slot_mapping,
                    positions=there.positions,
                    query_start_loc_cpu=starts32,
                    seq_lens_cpu=seq_lens32,
                    num_decodes=num_decodes,
                    common_prefix_len=prefixes[group] if prefixes else 0,
                    common_prefix=there.common_prefixes[group : group + 1] if prefixes and prefixes[group] else None,
                    tree=mask,
                ),
            )
            for feed, there, taken in zip(self.feeds, sent, tables, strict=True)
            for group, table, slot_mapping in zip(feed.cache_groups, taken, there.slot_mappings, strict=True)
        )
        wanted_batches = () if wanted is None else tuple(map(wanted.batch, batches))
        if self.has_uncached:
            batches += (self._uncached(sent[0], len(seq_lens), batch_tokens, starts32, seq_lens32),)
        return StepInputs(
            rows=rows,
            num_scheduled=counts,
            num_tokens=num_tokens,
            num_padded_tokens=num_padded_tokens,
            input_ids=input_ids_device,
            positions=sent[0].positions,
            logits_indices=logits_indices_device,
            logits_rows=logits_rows,
            draft_positions=draft_positions,
            draft_nodes=draft_nodes,
            tree=tree,
            drafts=drafts,
            rejections=rejections,
            query_start_loc=sent[-1].query_start_loc,
            query_start_loc_cpu=starts32,
            seq_lens_cpu=seq_lens32,
            batches=batches,
            states=states,
            shape=shape,
            stand_ins=stand_ins,
            sampling=batch,
            sampling_params=params,
            scored=scored,
            lora_slots=lora_slots_device,
            wanted_batches=wanted_batches,
            pending=pending,
        )

    def _stage_bounds(
        self, rows: Int, counts: Int, pending: npt.NDArray[np.bool_], num_requests: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the device needs to take off what fell: where it finds that number for each request, padded ones
        included, and for padded tokens, [num_requests + 1]; and for each token, which of these it is, [num_tokens]."""
        which = np.full(num_requests + 1, self.rows.max_requests)
        which[: len(rows)] = np.where(pending, rows, self.rows.max_requests)
        owner = np.full(num_tokens, num_requests)
        owner[: int(counts.sum())] = np.repeat(self._arange[: len(rows)], counts)
        upload = self.feeds[0].staging.upload
        return upload(which), upload(owner)

    @torch.inference_mode()  # the views were made while graphs were captured, and are inference tensors
    def _take_off(
        self,
        sent: Sent,
        tables: Sequence[torch.Tensor],
        states: StateBatch | None,
        which: torch.Tensor,
        owner: torch.Tensor,
    ) -> None:
        """Make bounds exact, in place: the drafts of a step before that fell have left no token behind."""
        assert self.last_tokens is not None
        fallen = self.last_tokens.fallen[which]
        sent.seq_lens.sub_(fallen[:-1])
        sent.positions.sub_(fallen[owner])
        if states is not None:
            states.num_accepted.sub_(fallen[:-1])
        request = owner.clamp(max=len(which) - 2)
        for group, size, table, slots in zip(
            self.groups, self.kernel_block_sizes, tables, sent.slot_mappings, strict=True
        ):
            if group.encoder_len is None:
                blocks = table[request, sent.positions // size].to(torch.int64)
                slots.copy_(torch.where(slots < 0, slots, blocks * size + sent.positions % size))

    def _of_group(
        self, group: int, sent: Sent, encoder_lens: npt.NDArray[np.int32], batch: AttentionBatch
    ) -> AttentionBatch:
        """The batch as the cache group sees it: all keys of an encoder, where it holds those."""
        if group not in self._encoder_groups:
            return batch
        longest = int(encoder_lens.max(initial=0))
        return evolve(
            batch,
            max_seq_len=longest,
            seq_lens=sent.encoder_lens,
            seq_lens_cpu=encoder_lens,
            causal=False,
            tree=None,
        )

    def _uncached(
        self, sent: Sent, num_requests: int, num_tokens: int, starts: npt.NDArray[np.int32], lens: npt.NDArray[np.int32]
    ) -> AttentionBatch:
        """The batch of layers that keep nothing: a request's keys are its tokens of this step, and all see all."""
        device = sent.positions.device
        return AttentionBatch(
            num_requests=num_requests,
            num_tokens=num_tokens,
            max_query_len=int(lens.max(initial=0)),
            max_seq_len=int(lens.max(initial=0)),
            query_start_loc=sent.query_start_loc,
            seq_lens=sent.seq_lens,
            block_table=torch.empty((num_requests, 0), dtype=torch.int32, device=device),
            slot_mapping=torch.full((num_tokens,), PAD_SLOT, dtype=torch.int64, device=device),
            positions=sent.positions,
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
            causal=False,
        )
