"""Drafting while steps overlap: step n + 1 is launched before the host knows which drafts stood in step n.

What the host counts of a step in flight is an upper bound: all of its drafts might stand. Behind each step's sampling
the device finds which ones did, so that it can take off the others from the next step's lengths and places, and the
drafter proposes there without the host. Tokens and drafts come to the host while the next step's forward pass runs; by
the time that it samples, everything is exact again: processors, grammars and random numbers see what they would see
in steps that run one after the other.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen

from slotline.core.batch.hidden_states import HiddenStates
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.core.batch.rejections import drafted
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.sampling_metadata import PACKED_WIDTH, SamplingMetadata
from slotline.core.batch.step_output import PendingSample
from slotline.core.device.transfer_buffer import Download, TransferBuffer, reserved_bytes
from slotline.core.model_runner.state_dispatcher import StateDispatcher
from slotline.core.speculation.device_verification import AcceptedDrafts, find_accepted, keep_drafts
from slotline.core.speculation.draft_attention import StagedAttention
from slotline.core.speculation.draft_runner import DraftRunner
from slotline.registry.contracts import DraftBatch

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class Proposal:
    """Drafts on their way to the host.

    Attributes:
        rows: [n] int64, whose drafts they are; `generations` [n] of those when the drafter was asked.
        found: [n, columns + k] int64: what the drafter said, then the drafts as the next step reads them.
        columns: of the first part.
    """

    rows: Int
    generations: Int
    found: Download
    columns: int


@frozen(kw_only=True, eq=False)
class VerifiedDrafts:
    """What a step's verification and the proposal behind it read, once the step before was handed out.

    Attributes:
        rows: [m] int64, the rows that sample; `verified` [m] their drafts in this step.
        num_requests: of the step.
        on_device: [6, m] int64 on the device: of each row its first place among the logits, its drafts, its known
            tokens, the number that stands for its next token, its place among the step's requests, its tokens there.
        rows_device: [m] int64 on the device; `places` [num_logits] the row's index in `rows` of each place.
        drafts: [num_logits] int64 on the device, the draft at each place, -1 behind a row's last.
        asked: [n] int64, indices into `rows` of those that get drafts; `asked_device` the same, None for all.
        room: [n] int64, most drafts of each; 0 for one that is asked for beside others alone.
        temperature: [n] float32 on the device.
        following: [num_padded_tokens] int64 on the device, the tokens behind the step's as far as the host knows them.
        input_ids, logits_indices: the step's, on the device.
        attend: plans the drafter's own attention from the positions [n] of the newest tokens, where it has any.
    """

    rows: Int
    verified: Int
    num_requests: int
    on_device: torch.Tensor
    rows_device: torch.Tensor
    places: torch.Tensor
    drafts: torch.Tensor | None
    asked: Int
    asked_device: torch.Tensor | None
    room: Int
    temperature: torch.Tensor
    following: torch.Tensor | None
    input_ids: torch.Tensor
    logits_indices: torch.Tensor
    attend: StagedAttention | None


class AsyncSpecDecode:
    """Stands between the engine and its drafter.

    Args:
        staging: of its own; the step's holds what the forward pass reads.
        states: of the model's state layers, where it has any.
        max_tokens: of a step.
    """

    def __init__(
        self,
        rows: RequestTable,
        drafting: DraftRunner,
        last_tokens: PlaceholderTokens,
        staging: TransferBuffer,
        states: StateDispatcher | None = None,
        *,
        max_tokens: int,
        vocab_size: int,
    ) -> None:
        self._rows = rows
        self._drafting = drafting
        self._last_tokens = last_tokens
        self._staging = staging
        self._states = states
        self._vocab_size = vocab_size
        most, count = rows.max_requests, rows.max_requests * (1 + drafting.num_tokens)
        attention = 0 if drafting.attention is None else drafting.attention.reserved_bytes(most)
        staging.reserve(
            reserved_bytes((count, PACKED_WIDTH), np.int32)
            + 2 * reserved_bytes((count,), np.int64)
            + reserved_bytes((6, most), np.int64)
            + 3 * reserved_bytes((most,), np.int64)
            + reserved_bytes((max(max_tokens, count),), np.int64)
            + attention
        )
        self._rehearse()

    def settle(self, inputs: ModelInputs, generations: Int) -> tuple[ModelInputs, VerifiedDrafts]:
        """Return a launched step's inputs with exact host numbers, once the step before was handed out.

        What sampling reads is sent.

        Args:
            generations: [max_requests] of all rows when the step was launched.
        """
        rows, which, positions = self._rows, inputs.logits_rows, inputs.draft_positions
        seq_lens = inputs.seq_lens_cpu
        if inputs.pending is not None:
            fallen, seq_lens = np.where(inputs.pending, rows.num_fallen[inputs.rows], 0), seq_lens.copy()
            seq_lens[: len(fallen)] -= fallen.astype(np.int32)
        self._staging.begin()
        upload = self._staging.upload
        sampling = SamplingMetadata.gather(rows, which, positions)
        inputs = evolve(
            inputs,
            seq_lens_cpu=seq_lens,
            sampling=sampling,
            sampling_params=None if sampling.all_greedy else upload(sampling.packed()),
            drafts=None if positions is None else drafted(rows, which, positions),
        )
        first = np.arange(len(which)) if positions is None else np.flatnonzero(positions == 0)
        verified = np.diff(np.append(first, len(which))) - 1
        own = which[first]
        known, at = rows.num_tokens[own], np.flatnonzero(np.isin(inputs.rows, own))
        live = rows.generation[own] == generations[own]
        bound = known + verified + 1
        room = rows.length_limit[own] - bound - 1  # as in `DraftRunner.propose`, were all drafts to stand
        live = np.flatnonzero(live)
        asked = live[self._drafting.wanted(own[live], room[live])]
        asked = asked if self._drafting.asks(own[asked]) else asked[:0]
        attention, attend = self._drafting.attention, None
        if attention is not None and len(asked):
            attend = attention.stage(own[asked], bound[asked] - 1, upload)
        settled = VerifiedDrafts(
            rows=own,
            verified=verified,
            num_requests=len(inputs.rows),
            on_device=upload(
                np.stack([first, verified, known, self._last_tokens.stand_ins(own), at, inputs.num_scheduled[at]])
            ),
            rows_device=upload(own),
            places=upload(np.repeat(np.arange(len(own)), verified + 1)),
            drafts=None if inputs.drafts is None else upload(inputs.drafts),
            asked=asked,
            asked_device=None if len(asked) == len(own) else upload(asked),
            room=np.clip(room[asked], 0, self._drafting.num_tokens),
            temperature=upload(rows.temperature[own[asked]]),
            following=upload(np.minimum(self._drafting.following(inputs), self._vocab_size - 1))
            if self._drafting.observing
            else None,
            input_ids=inputs.input_ids,
            logits_indices=inputs.logits_indices,
            attend=attend,
        )
        self._staging.flush()
        self._staging.mark()
        return inputs, settled

    @torch.inference_mode()
    def propose(self, settled: VerifiedDrafts, sampling: PendingSample) -> Proposal | None:
        """Find which drafts stand, keep what the next step reads of that, and ask for the drafts behind; on the device.

        None where no request gets drafts.
        """
        drafting, table = self._drafting, self._last_tokens
        stood = find_accepted(
            sampling.sampled,
            settled.drafts,
            settled.on_device,
            settled.rows_device,
            settled.places,
            settled.input_ids,
            settled.logits_indices,
            table,
        )
        if self._states is not None and settled.drafts is not None:
            at, scheduled = settled.on_device[4:].unbind()
            slots = torch.full((settled.num_requests,), -1, dtype=torch.int32, device=at.device)
            slots[at] = torch.where(stood.fallen > 0, settled.rows_device, -1).int()
            accepted = torch.ones_like(slots)
            accepted[at] = (scheduled - stood.fallen).int()
            self._states.commit_there(slots, accepted)
        self._rows.num_drafts[settled.rows] = 0  # those of a row that waits for its exact number stay
        drafting.behind(settled.rows)
        states, computed = sampling.states, sampling.computed
        if computed is not None and settled.following is not None:
            inputs = computed.inputs
            ahead = settled.following.index_copy(0, inputs.logits_indices, sampling.sampled.clamp(min=0))
            drafting.observe(computed, ahead)
        drafting.computed()
        if len(settled.asked) == 0:
            return None
        stand_ins = settled.on_device[3]
        states = None if states is None else states.pick(stood.last)
        if (chosen := settled.asked_device) is not None:
            stood, stand_ins = AcceptedDrafts(*(tensor[chosen] for tensor in stood)), stand_ins[chosen]
            states = None if states is None else states.pick(chosen)
        start, rows = perf_counter(), settled.rows[settled.asked]
        try:
            if drafting.needs_history:
                drafting.history.follow(rows, self._rows.num_tokens[rows])
            draft = drafting.ask(self._batch(settled, rows, stood, states), settled.attend)
            drafting.check_shape(draft, len(rows))
        except Exception as error:  # a plugin may raise anything; the requests go on without drafts
            drafting.failed(len(rows), f"propose raised {type(error).__name__}: {error}")
            return None
        found = draft.token_ids
        counts = drafting.chosen(rows, np.minimum(found.shape[1], settled.room), perf_counter() - start)
        used = drafting.most(self._bounds(settled)) if drafting.uniform and counts.any() else counts
        self._rows.num_drafts[rows], self._rows.num_guesses[rows] = used, counts
        if found.shape[1] == drafting.num_tokens:  # else what fills is not in the drafter's cache
            drafting.caught_up(rows, self._bounds(settled) - 1)
        return Proposal(
            rows=rows,
            generations=self._rows.generation[rows],
            found=self._staging.download(keep_drafts(found, stood.newest, stand_ins, table, self._vocab_size)),
            columns=found.shape[1],
        )

    def place(self, proposal: Proposal) -> None:
        """Write the drafts behind the tokens of their rows, all of which are known by now."""
        found = proposal.found.wait()
        guesses, drafts = found[:, : proposal.columns], found[:, proposal.columns :]
        rows = self._rows
        live = rows.generation[proposal.rows] == proposal.generations
        outside = self._drafting.outside(guesses)
        own, drafts = proposal.rows[live], drafts[live]
        meant = np.cumprod((guesses[live] >= 0) & ~outside[live], axis=1).sum(axis=1)
        rows.num_guesses[own] = np.minimum(rows.num_guesses[own], meant)
        rows.write_drafts(own, drafts, np.arange(drafts.shape[1]) < rows.num_drafts[own][:, None])

    def _rehearse(self) -> None:
        """Compile what a proposal runs around the drafter, on a row that has not sampled yet."""
        table = self._last_tokens
        zero = torch.zeros(1, dtype=torch.int64, device=table.fallen.device)
        on_device = torch.zeros(6, 1, dtype=torch.int64, device=zero.device)
        on_device[3] += int(table.stand_ins(np.zeros(1, np.int64))[0])
        for drafts in (None, zero):
            find_accepted(zero, drafts, on_device, zero, zero, zero, zero, table)
        drafted = zero[:, None].expand(1, table.max_drafts).contiguous()
        keep_drafts(drafted, zero, on_device[3], table, self._vocab_size)

    def _batch(
        self, settled: VerifiedDrafts, rows: Int, stood: AcceptedDrafts, states: HiddenStates | None
    ) -> DraftBatch:
        return DraftBatch(
            rows=torch.from_numpy(rows.copy()),
            token_table=self._drafting.history.tensor,
            num_tokens=torch.from_numpy(self._bounds(settled).astype(np.int32)),
            last_token_ids=stood.newest,
            positions=stood.positions,
            previous_token_ids=stood.previous if self._drafting.catches_up else None,
            hidden_states=None if states is None else states.last,
            layer_hidden_states=None if states is None else states.layers,
            computed_index=None if states is None else states.index,
            temperature=settled.temperature,
        )

    def _bounds(self, settled: VerifiedDrafts) -> Int:
        """The most tokens of those that get drafts, [n], the newest included."""
        bounds: Int = self._rows.num_tokens[settled.rows[settled.asked]] + settled.verified[settled.asked] + 1
        return bounds
