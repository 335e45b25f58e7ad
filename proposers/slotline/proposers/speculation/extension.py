"""Extension of a plan with a drafter: it takes part in a step as the package's docstring says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve

from slotline.builder.graph_capturer import GraphCapturer
from slotline.builder.parts import Parts
from slotline.core.batch.input_batch_cpu import InputBatchCPU
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import ForwardOutput, PendingSample, StepOutput
from slotline.core.device.transfer_buffer import reserved_bytes
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher
from slotline.proposers.speculation.async_spec_decode import NAME, AsyncSpecDecode
from slotline.proposers.speculation.build import DraftRunnerBuilder
from slotline.proposers.speculation.draft_runner import DraftRunner
from slotline.proposers.speculation.draft_table import DraftTable
from slotline.proposers.speculation.draft_timing import MeasuredStep
from slotline.proposers.speculation.hidden_states import ComputedStates, HiddenStates
from slotline.proposers.speculation.rejected_token_correction import make_exact
from slotline.proposers.speculation.rejections import PLACE_WIDTH
from slotline.proposers.speculation.spec_decode_metrics import SpecDecodeMetrics
from slotline.proposers.speculation.step_drafts import SampledDrafts, StepDrafts, arrange_trees, with_mask
from slotline.proposers.speculation.verification import rehearse_rejection, reject, standing
from slotline.registry.contracts import ExtensionContext, TreeMask

Int = npt.NDArray[np.int64]


class DraftsExtension:
    """Speculative decoding that proposes once a step's tokens are handed out.

    Attributes:
        drafting: the drafter and its record.
        overlap: drafts under async scheduling. None without.
    """

    overlap: AsyncSpecDecode | None = None

    def __init__(self, parts: Parts, builder: DraftRunnerBuilder, router: AttentionDispatcher | None = None) -> None:
        self._parts = parts
        self._builder = builder
        self._planned = parts.planned
        self._rows = parts.rows
        self._profiler = parts.profiler
        self._revise: tuple[Callable[[DraftTable, Int, int], None], ...] = tuple(
            one.after_draft for one in parts.named.values() if hasattr(one, "after_draft")
        )
        self.drafting: DraftRunner = builder.build(None if router is None else builder.attention(router))

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers whose inputs the drafter reads, those of other ranks included."""
        return self._builder.layer_ids

    @property
    def counts(self) -> SpecDecodeMetrics:
        """The acceptance and the times of a run."""
        return self.drafting.counts

    def to_json(self) -> dict[str, Any]:
        """Return the statistics, see `DraftRunner.to_json`."""
        return self.drafting.to_json()

    def measured(self) -> Sequence[MeasuredStep]:
        """Return the times of the steps that are over by now."""
        return self.drafting.measured()

    def learn(self, measured: Sequence[MeasuredStep]) -> None:
        """Decide by these times from now on."""
        self.drafting.learn(measured)

    def bind_caches(self, router: AttentionDispatcher) -> DraftsExtension:
        """Return the extension whose drafter's own layers attend over these caches."""
        return type(self)(self._parts, self._builder, router)

    def rehearse(self, output: StepOutput) -> None:
        """Show the drafter a made-up step. If drafts come with probabilities, try rejection sampling at its largest.

        On a CPU memory is not measured, and one request is enough.
        """
        self.drafting.rehearse(output.extras[NAME].computed)
        if self.drafting.gives_probabilities:
            planned = self._planned
            requests = 1 if planned.on_host else self._rows.max_requests
            rehearse_rejection(requests, self.drafting.num_tokens, planned.facts.vocab_size, planned.device)

    def capture_graphs(self, graphs: GraphCapturer, *, progress: bool) -> None:
        """Capture the drafter's work if the plan says so."""
        if self._planned.captures_drafts and self._planned.proposes:
            self.drafting.capture(graphs, progress=progress)

    def admit(self, request: Request) -> None:
        """Admit a request to the drafter."""
        self.drafting.admit(request)

    def release(self, row: int) -> None:
        """Have the drafter forget a row."""
        self.drafting.release(row)

    def restore(self, requests: Sequence[Request]) -> None:
        """Forget all drafts."""
        self.drafting.forget()

    def before_step(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Record the start of a step."""
        if scheduled.num_tokens:
            self.drafting.begin_step(scheduled)
        return scheduled

    def needs_eager(self, scheduled: SchedulerOutput) -> bool:
        """Return True if a step verifies a tree."""
        return self.drafting.drafts.tree is not None and bool(self._rows.num_spec_tokens[scheduled.rows].any())

    def arrange_spec_tokens(self, batch: InputBatchCPU) -> InputBatchCPU:
        """Return a step's batch with the positions of a tree."""
        drafts = self.drafting.drafts
        return batch if drafts.tree is None and drafts.trees is None else arrange_trees(drafts, batch)

    def staging_bytes(self, max_tokens: int) -> int:
        """Return the bytes of bounds, of a tree's mask and of the places of rejection sampling."""
        requests, most = self._rows.max_requests, self.drafting.num_tokens
        bounds = reserved_bytes((requests + 1,), np.int64)
        bounds += reserved_bytes((max(max_tokens, requests * (1 + most)),), np.int64)
        tree = reserved_bytes((most, most), np.bool_) + reserved_bytes((most,), np.int64)
        return bounds + tree + reserved_bytes((requests * most, PLACE_WIDTH), np.int64)

    def gather(self, batch: InputBatchCPU, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> StepDrafts:
        """Gather the drafts of a step."""
        known = self.drafting.probabilities is not None
        return StepDrafts.gather(self.drafting.drafts, batch, upload, known_distribution=known)

    def prepare_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Return a step's inputs with the mask of a tree."""
        mask = inputs.extras[NAME].mask
        return inputs if mask is None else with_mask(inputs, mask)

    def forward_kwargs(self, inputs: ModelInputs) -> Mapping[str, Any]:
        """Return what copies the inputs of layers, if the drafter reads any."""
        return {} if self.drafting.taps is None else {"tap": self.drafting.taps}

    def capture_kwargs(
        self, inputs: ModelInputs, broken: frozenset[str], cut: Callable[[Callable[[], None]], None]
    ) -> Mapping[str, Any]:
        """Return the same: the copies are captured."""
        return self.forward_kwargs(inputs)

    def take_results(self) -> torch.Tensor | None:
        """Return the inputs of layers that the drafter reads, [num_padded_tokens, layers * hidden_size]."""
        return None if self.drafting.taps is None else self.drafting.taps.take()

    def wants_all_hidden(self, inputs: ModelInputs) -> bool:
        """Return True if the drafter observes the step."""
        return self.drafting.observing

    def wants_final_logits(self, inputs: ModelInputs) -> bool:
        """Return True if rejection sampling decides drafts of the step."""
        return inputs.extras[NAME].rejections is not None

    def revise_tokens(self, tokens: torch.Tensor, final: torch.Tensor | None, inputs: ModelInputs) -> torch.Tensor:
        """Return the tokens [num_logits] after rejection sampling, if it applies."""
        rejections, probabilities = inputs.extras[NAME].rejections, self.drafting.probabilities
        if rejections is None or final is None or probabilities is None:
            return tokens
        return reject(final, tokens, probabilities, rejections)

    def keep_states(self, launched: ForwardOutput, states: torch.Tensor) -> SampledDrafts:
        """Return the states that the drafter reads: of the logits rows, and of all tokens if it reads those."""
        inputs, layers, drafting = launched.inputs, launched.extras.get(NAME), self.drafting
        if not self._planned.proposes:
            guesses = drafting.drafts.num_guesses[inputs.sampling.rows]
            return SampledDrafts(step=inputs.extras[NAME], guesses=guesses, states=None, computed=None)
        observing, computed = drafting.observing, None
        own = HiddenStates(
            last=states if drafting.needs_hidden_states else None,
            layers=None if layers is None else layers[inputs.logits_indices],
            index=inputs.logits_indices if observing else None,
        )
        if observing:
            token_ids = self._builder.token_ids(inputs)
            computed = ComputedStates(
                inputs=inputs, token_ids=token_ids, attend=launched.attend, hidden=launched.hidden, layers=layers
            )
        guesses = drafting.drafts.num_guesses[inputs.sampling.rows]
        return SampledDrafts(step=inputs.extras[NAME], guesses=guesses, states=own, computed=computed)

    def accept_tokens(self, pending: PendingSample, token_ids: Int) -> tuple[Int, Int | None]:
        """Return the logits rows whose drafts all stand, and count them."""
        own: SampledDrafts = pending.extras[NAME]
        step, positions = own.step, pending.spec_positions
        assert step.token_ids is not None
        assert positions is not None
        stands = standing(token_ids, step.token_ids, positions, step.trees)
        self.drafting.count(pending.batch.rows, positions, stands, own.guesses)
        places = np.flatnonzero(stands)
        return places, None if step.trees is None else step.trees.num_kept(places)

    def after_step(self, output: StepOutput, generations: Int) -> None:
        """Ask for the drafts that the next step verifies."""
        with self._profiler.scope("draft"):
            self._propose(output, generations)

    def _propose(self, output: StepOutput, generations: Int) -> None:
        own: SampledDrafts = output.extras[NAME]
        rows, places = output.rows, output.places
        if output.spec_positions is not None:
            rows = rows[output.spec_positions == 0]
        going = self._rows.generation[rows] == generations[rows]
        hidden = own.states
        if hidden is not None and places is not None:
            last = np.append(output.rows[1:] != output.rows[:-1], True) if len(places) else slice(0)
            hidden = hidden.take(places[last][going])
        if own.computed is not None:
            self.drafting.observe(own.computed, self._following(own))
        self.drafting.propose(rows[going], hidden)
        for revise in self._revise:
            revise(self.drafting.drafts, rows[going], self.drafting.num_tokens)

    def _following(self, own: SampledDrafts) -> torch.Tensor | None:
        """Return the token after each of a step that verified trees, [num_padded_tokens]. None if it verified none.

        An accepted node is followed by the token at the next place of the text, wherever the node's keys lie.
        """
        if own.step.trees is None or own.computed is None:
            return None
        inputs = own.computed.inputs
        following = np.zeros(inputs.num_padded_tokens, np.int64)
        after = inputs.positions[: inputs.num_tokens].cpu().numpy() + 1
        rows = np.repeat(inputs.rows, inputs.num_scheduled)
        following[: inputs.num_tokens] = self._rows.token_ids[rows, np.minimum(after, self._rows.max_model_len - 1)]
        return torch.from_numpy(following).to(inputs.positions.device)


class RequestTreesExtension(DraftsExtension):
    """Speculative decoding that verifies a tree for each request, in replayed graphs too.

    A graph of a verifying or mixed step always holds the masks of trees. Those of chains are trees too.
    """

    def needs_eager(self, scheduled: SchedulerOutput) -> bool:
        """Return True if a step verifies drafts and the graphs hold no trees."""
        if self._planned.captures_trees:
            return False
        return bool(self._rows.num_spec_tokens[scheduled.rows].any())

    def staging_bytes(self, max_tokens: int) -> int:
        """Return the bytes of the masks of trees."""
        requests, most = self._rows.max_requests, self.drafting.num_tokens
        masks = reserved_bytes((requests, most, most), np.bool_) + reserved_bytes((requests, most), np.int64)
        return masks + reserved_bytes((requests,), np.int32)

    def gather(self, batch: InputBatchCPU, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> StepDrafts:
        """Gather the drafts of a step."""
        return StepDrafts.gather_trees(self.drafting.drafts, batch, upload)

    def captured_inputs(self, inputs: ModelInputs) -> tuple[torch.Tensor, ...]:
        """Return the masks that captured attention reads."""
        mask: TreeMask | None = inputs.extras[NAME].mask
        if mask is None or mask.num_nodes_device is None or not self._holds_trees(inputs):
            return ()
        return mask.sees, mask.depths, mask.num_nodes_device

    def prepare_captured(self, inputs: ModelInputs) -> ModelInputs:
        """Return the inputs of a capture with the masks of trees, if its replays read them."""
        return with_mask(inputs, inputs.extras[NAME].mask) if self._holds_trees(inputs) else inputs

    def prepare_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Return a step's inputs with the masks of trees, if there are any or a replay reads them."""
        drafts: StepDrafts = inputs.extras[NAME]
        if drafts.mask is None or not (drafts.trees is not None or self._holds_trees(inputs)):
            return inputs
        return with_mask(inputs, drafts.mask)

    def _holds_trees(self, inputs: ModelInputs) -> bool:
        """Return True if the graph of a step's shape reads masks of trees."""
        return self._planned.captures_trees and inputs.shape is not None and inputs.shape.query_len != 1


class OverlappedDraftsExtension(DraftsExtension):
    """Speculative decoding under async scheduling: verification and proposal on the device."""

    overlap: AsyncSpecDecode

    def __init__(self, parts: Parts, builder: DraftRunnerBuilder, router: AttentionDispatcher | None = None) -> None:
        super().__init__(parts, builder, router)
        self.overlap = builder.overlap(self.drafting)

    def prepare_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Make the numbers of a step exact on the device."""
        bounds = inputs.extras[NAME].bounds
        if bounds is not None and self._builder.last_tokens is not None:
            make_exact(
                inputs, bounds, self._builder.last_tokens, self._builder.groups, self._builder.kernel_block_sizes
            )
        return inputs

    def settle_step(
        self, launched: ForwardOutput, scheduled: SchedulerOutput, generations: Int
    ) -> tuple[ForwardOutput, SchedulerOutput]:
        """Make the host's numbers exact, and send what the verification reads."""
        inputs, rows = launched.inputs, scheduled.rows
        if inputs.pending is not None:
            rejected = np.where(inputs.pending, self._rows.num_rejected[rows], 0)
            scheduled = evolve(scheduled, num_computed=scheduled.num_computed - rejected)
        inputs, _ = self.overlap.settle(inputs, generations)
        return evolve(launched, inputs=inputs), scheduled

    def extend_pending(self, pending: PendingSample) -> PendingSample:
        """Verify on the device and propose. The samples keep nothing that the drafter has read."""
        own: SampledDrafts = pending.extras[NAME]
        assert own.step.settled is not None
        with self._profiler.scope("draft"):
            proposal = self.overlap.propose(own.step.settled, pending.sampled, own.states, own.computed)
        kept = SampledDrafts(step=own.step, guesses=own.guesses, states=None, computed=None, proposal=proposal)
        return evolve(pending, extras={**pending.extras, NAME: kept})

    def after_step(self, output: StepOutput, generations: Int) -> None:
        """Write the drafts after the tokens of their rows, which are all known by now."""
        proposal = output.extras[NAME].proposal
        if proposal is not None:
            self.overlap.place(proposal)


def build_drafts(context: ExtensionContext) -> DraftsExtension:
    """Build speculative decoding as the plan schedules it."""
    parts: Parts = context.parts
    trees = parts.planned.draft_form == "request_trees"
    kind = RequestTreesExtension if trees else DraftsExtension
    kind = OverlappedDraftsExtension if parts.planned.asynchronous else kind
    return kind(parts, DraftRunnerBuilder.of(parts))
