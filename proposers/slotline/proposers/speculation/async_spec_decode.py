"""Async scheduling with drafts: step n + 1 is launched before the host knows which drafts step n accepted.

The host's counts for a step in flight are upper bounds, as if all of its drafts were accepted. After each step's
sampling the device determines the accepted drafts. It subtracts the rejected ones from the next step's lengths and
positions, and the drafter proposes on the device without the host. Tokens and drafts reach the host while the next
step's forward pass runs. By the time the next step samples, all counts are exact again: processors, grammars and
random numbers see the same values as without async scheduling.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve

from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.sampling_metadata import PACKED_WIDTH, SamplingMetadata
from slotline.core.device.transfer_buffer import TransferBuffer, reserved_bytes
from slotline.proposers.speculation.device_verification import AcceptedDrafts, find_accepted, keep_drafts
from slotline.proposers.speculation.draft_runner import DraftRunner
from slotline.proposers.speculation.hidden_states import ComputedStates, HiddenStates
from slotline.proposers.speculation.rejections import drafted
from slotline.proposers.speculation.step_drafts import StepDrafts
from slotline.proposers.speculation.verified_drafts import Proposal, VerifiedDrafts
from slotline.registry.contracts import DraftBatch

Int = npt.NDArray[np.int64]
NAME = "drafts"
"""Of the extension, under which a step's inputs and samples hold its data."""


class AsyncSpecDecode:
    """Draft verification and proposal with async scheduling, between the engine and its drafter.

    Args:
        rows: the request table.
        drafting: the drafter.
        last_tokens: the table of placeholder tokens.
        staging: a transfer buffer separate from the step's, which holds the inputs of the forward pass.
        states: extension of the model's state layers, if it has any.
        max_tokens: most tokens of a step.
        vocab_size: size of the vocabulary.
    """

    def __init__(
        self,
        rows: RequestTable,
        drafting: DraftRunner,
        last_tokens: PlaceholderTokens,
        staging: TransferBuffer,
        states: Any = None,
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

        What sampling reads is sent. The inputs hold the second result too, in `StepDrafts.settled`.

        Args:
            inputs: the step's inputs.
            generations: [max_requests], generations of all rows when the step was launched.
        """
        rows, which, positions = self._rows, inputs.logits_rows, inputs.spec_positions
        seq_lens = inputs.seq_lens_cpu
        if inputs.pending is not None:
            fallen, seq_lens = np.where(inputs.pending, rows.num_rejected[inputs.rows], 0), seq_lens.copy()
            seq_lens[: len(fallen)] -= fallen.astype(np.int32)
        self._staging.begin()
        upload = self._staging.upload
        sampling = SamplingMetadata.gather(rows, which, positions)
        drafts = None if positions is None else drafted(rows, which, positions)
        extras = dict(inputs.extras)
        inputs = evolve(
            inputs,
            seq_lens_cpu=seq_lens,
            sampling=sampling,
            sampling_params=None if sampling.all_greedy else upload(sampling.packed()),
            extras=extras,
        )
        first = np.arange(len(which)) if positions is None else np.flatnonzero(positions == 0)
        verified = np.zeros(len(which), np.int64) if inputs.num_verified is None else inputs.num_verified
        own = which[first]
        known, at = rows.num_tokens[own], np.flatnonzero(np.isin(inputs.rows, own))
        live = rows.generation[own] == generations[own]
        bound = known + verified + 1
        room = rows.length_limit[own] - bound - 1  # as in `DraftRunner.propose`, if all drafts were accepted
        live = np.flatnonzero(live)
        asked = live[self._drafting.select_rows(own[live], room[live])]
        asked = asked if self._drafting.should_propose(own[asked]) else asked[:0]
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
            drafts=None if drafts is None else upload(drafts),
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
        extras[NAME] = StepDrafts(token_ids=drafts, settled=settled)
        self._staging.flush()
        self._staging.mark()
        return inputs, settled

    @torch.inference_mode()
    def propose(
        self,
        settled: VerifiedDrafts,
        sampled: torch.Tensor,
        states: HiddenStates | None,
        computed: ComputedStates | None,
    ) -> Proposal | None:
        """Find the accepted drafts, store the next step's inputs, and call the drafter, all on the device.

        Args:
            settled: from `settle`.
            sampled: [num_logits] int64, as in `PendingSample`.
            states: of the logits rows.
            computed: of all tokens.

        Returns:
            The proposal, or None if no request gets drafts.
        """
        drafting, table = self._drafting, self._last_tokens
        stood = find_accepted(
            sampled,
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
        self._rows.num_spec_tokens[settled.rows] = 0  # drafts of a row that waits for its exact count stay
        drafting.mark_unproposed(settled.rows)
        if computed is not None and settled.following is not None:
            inputs = computed.inputs
            ahead = settled.following.index_copy(0, inputs.logits_indices, sampled.clamp(min=0))
            drafting.observe(computed, ahead)
        drafting.record_computed()
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
            draft = drafting.call_drafter(self._batch(settled, rows, stood, states), settled.attend)
            drafting.check_shape(draft, len(rows))
        except Exception as error:  # a plugin may raise anything, and the requests continue without drafts
            drafting.lose(rows)
            drafting.failed(len(rows), f"propose raised {type(error).__name__}: {error}")
            return None
        found = draft.token_ids
        counts = drafting.choose_counts(rows, np.minimum(found.shape[1], settled.room), perf_counter() - start)
        used = drafting.limit_drafts(self._bounds(settled)) if drafting.uniform and counts.any() else counts
        self._rows.num_spec_tokens[rows], self._drafting.drafts.num_guesses[rows] = used, counts
        if found.shape[1] == drafting.num_tokens:  # otherwise the filling tokens are not in the drafter's cache
            drafting.caught_up(rows, self._bounds(settled) - 1)
        return Proposal(
            rows=rows,
            generations=self._rows.generation[rows],
            found=self._staging.download(keep_drafts(found, stood.newest, stand_ins, table, self._vocab_size)),
            columns=found.shape[1],
        )

    def place(self, proposal: Proposal) -> None:
        """Write the drafts after the tokens of their rows, which are all known by now."""
        found = proposal.found.wait()
        guesses, drafts = found[:, : proposal.columns], found[:, proposal.columns :]
        rows = self._rows
        live = rows.generation[proposal.rows] == proposal.generations
        outside = self._drafting.outside(guesses)
        own, drafts = proposal.rows[live], drafts[live]
        meant = np.cumprod((guesses[live] >= 0) & ~outside[live], axis=1).sum(axis=1)
        num_guesses = self._drafting.drafts.num_guesses
        num_guesses[own] = np.minimum(num_guesses[own], meant)
        rows.write_spec_tokens(own, drafts, np.arange(drafts.shape[1]) < rows.num_spec_tokens[own][:, None])

    def _rehearse(self) -> None:
        """Compile the kernels around the drafter, on a row that has not sampled yet."""
        table = self._last_tokens
        zero = torch.zeros(1, dtype=torch.int64, device=table.rejected.device)
        on_device = torch.zeros(6, 1, dtype=torch.int64, device=zero.device)
        on_device[3] += int(table.stand_ins(np.zeros(1, np.int64))[0])
        for drafts in (None, zero):
            find_accepted(zero, drafts, on_device, zero, zero, zero, zero, table)
        drafted = zero[:, None].expand(1, table.max_spec_tokens).contiguous()
        keep_drafts(drafted, zero, on_device[3], table, self._vocab_size)

    def _batch(
        self, settled: VerifiedDrafts, rows: Int, stood: AcceptedDrafts, states: HiddenStates | None
    ) -> DraftBatch:
        return DraftBatch(
            rows=torch.from_numpy(rows.copy()),
            token_table=self._drafting.history.tensor,
            num_tokens=torch.from_numpy(self._drafting.history.lengths(rows, self._bounds(settled)).astype(np.int32)),
            last_token_ids=stood.newest,
            positions=stood.positions,
            previous_token_ids=stood.previous if self._drafting.catches_up else None,
            hidden_states=None if states is None else states.last,
            layer_hidden_states=None if states is None else states.layers,
            computed_index=None if states is None else states.index,
            temperature=settled.temperature,
        )

    def _bounds(self, settled: VerifiedDrafts) -> Int:
        """Return the most tokens [n] of the requests that get drafts, including the newest."""
        bounds: Int = self._rows.num_tokens[settled.rows[settled.asked]] + settled.verified[settled.asked] + 1
        return bounds
