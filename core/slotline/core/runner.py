"""The runner: from a step's inputs to sampled tokens. It knows no plugin by name; what it calls was built for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field

from slotline.core.attention import Attend, AttentionRouter
from slotline.core.drafting import Drafting
from slotline.core.graphs import GraphRunner
from slotline.core.inputs import StepInputs
from slotline.core.logprobs import LogprobTable, gather_logprobs
from slotline.core.outputs import TokenLogprobs
from slotline.core.processors import ProcessorPipeline
from slotline.core.profiling import StepProfiler
from slotline.core.rows import Rows
from slotline.core.sampler import SamplingBatch, sample
from slotline.core.staging import Staging
from slotline.core.verification import reject, standing
from slotline.registry.contracts import Model

Int = npt.NDArray[np.int64]
_PROMPT_LOGITS_AT_A_TIME = 256  # bounds the memory of prompt log-probabilities: so many rows of the vocabulary


@define(kw_only=True, eq=False)
class StepOutput:
    """What a step gave.

    Attributes:
        rows: [n] int64, permanent rows that got a token; once for each token, a row's tokens in order.
        token_ids: [n] int32.
        draft_positions: [n] int64, which of its row's tokens in this step each is; None where nothing was drafted.
        hidden_states: [distinct rows, hidden_size] of each row's last accepted position, where a drafter needs them.
        logprobs: by row, an entry for each token, where asked for.
        prompt_logprobs: by row, entries for the prompt positions that this step covered, with the first position.
        num_nans: by row, only rows with NaN logits.
    """

    rows: Int
    token_ids: npt.NDArray[np.int32]
    draft_positions: Int | None = None
    hidden_states: torch.Tensor | None = None
    logprobs: dict[int, list[TokenLogprobs]] = field(factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(factory=dict)
    num_nans: dict[int, int] = field(factory=dict)

    def rounds(self) -> Iterator[tuple[Int, npt.NDArray[np.int32]]]:
        """Distinct rows and a token of each: first the first tokens of all, then the second ones, and so on."""
        if self.draft_positions is None:
            yield self.rows, self.token_ids
            return
        for position in range(int(self.draft_positions.max(initial=0)) + 1):
            own = self.draft_positions == position
            yield self.rows[own], self.token_ids[own]


class _Sampled(NamedTuple):
    """The tokens that were sampled and stand: logits rows [n], permanent rows, tokens, draft positions or None."""

    places: Int
    rows: Int
    token_ids: Int
    draft_positions: Int | None


class Runner:
    """Runs steps; the same `run` serves profiling, warm-up and real requests."""

    def __init__(
        self,
        model: Model,
        router: AttentionRouter,
        rows: Rows,
        pipeline: ProcessorPipeline,
        staging: Staging,
        profiler: StepProfiler,
        drafting: Drafting | None = None,
        *,
        logprobs_mode: str = "raw_logprobs",
        count_nans: bool = False,
    ) -> None:
        self.model = model
        self.router = router
        self.rows = rows
        self.pipeline = pipeline
        self.staging = staging
        self.profiler = profiler
        self.drafting = drafting
        self.graphs: GraphRunner | None = None
        when, _, what = logprobs_mode.partition("_")
        self.raw_logprobs = when == "raw"
        self.normalise_logprobs = what == "logprobs"
        self.count_nans = count_nans

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> StepOutput:
        """One step: plan attention, forward, logits, processors, sample or verify, log-probabilities."""
        scope = self.profiler.scope
        with scope("plan"):
            attend = self.router.plan(inputs.batches)
        whole = bool((self.rows.num_prompt_logprobs[inputs.rows] >= 0).any())  # a prompt's tokens are scored too
        with scope("forward"):
            hidden, logits = self._forward_or_replay(inputs, attend, whole=whole)
        with scope("logits"):
            states, logits = self._wanted(inputs, hidden, logits, whole=whole)
        batch = SamplingBatch.gather(self.rows, inputs.logits_rows, inputs.draft_positions)
        with scope("process"):
            processed = self.pipeline.apply(logits, batch.rows, inputs.draft_positions, all_greedy=batch.all_greedy)
        with scope("sample"):
            tokens, final = sample(processed, batch)
            sampled = self._verify(tokens, final, batch, inputs.draft_positions)
        with scope("output"):
            output = self._output(logits, final, states, sampled)
            output.prompt_logprobs = self._prompt_logprobs(inputs, hidden) if whole else {}
        return output

    def forward(self, inputs: StepInputs, attend: Attend, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """The model's forward pass: hidden states of the `wanted` tokens, or of all num_padded_tokens."""
        if wanted is not None and len(wanted) == inputs.num_padded_tokens:
            wanted = None  # each request has one token: all are wanted, in order
        return self.model.forward(inputs.input_ids, inputs.positions, attend, wanted)

    def _forward_or_replay(
        self, inputs: StepInputs, attend: Attend, *, whole: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states, and logits where a graph holds them: of all num_padded_tokens when replayed or `whole`."""
        if inputs.shape is not None and self.graphs is not None:
            return self.graphs.replay(inputs)
        return self.forward(inputs, attend, None if whole else inputs.logits_indices), None

    def _wanted(
        self, inputs: StepInputs, hidden: torch.Tensor, logits: torch.Tensor | None, *, whole: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits [num_logits, ...] of the tokens that sample."""
        count = len(inputs.logits_rows)
        if inputs.shape is None and not whole:
            return hidden, self.model.compute_logits(hidden)
        in_order = count == inputs.num_tokens  # every real token samples, and they come first
        states = hidden[:count] if in_order else hidden[inputs.logits_indices]
        if logits is None:
            return states, self.model.compute_logits(states)
        return states, logits[:count] if in_order else logits[inputs.logits_indices]

    def _verify(
        self, tokens: torch.Tensor, final: torch.Tensor, batch: SamplingBatch, draft_positions: Int | None
    ) -> _Sampled:
        """Which of the logits rows give their request a token: all where nothing was drafted."""
        if draft_positions is None or self.drafting is None:
            return _Sampled(np.arange(len(batch.rows)), batch.rows, self.staging.download(tokens), None)
        drafting = self.drafting
        drafts = drafting.drafts(batch.rows, draft_positions)
        index = np.flatnonzero((drafts >= 0) & (batch.temperature > 0))
        proposed = drafting.probabilities(batch.rows, draft_positions, index) if len(index) else None
        if proposed is not None:
            tokens = reject(final, tokens, batch, drafts, proposed.to(final.device), index)
        token_ids = self.staging.download(tokens)
        stands = standing(token_ids, drafts, draft_positions)
        drafting.count(draft_positions, stands)
        index = np.flatnonzero(stands)
        return _Sampled(index, batch.rows[index], token_ids[index], draft_positions[index])

    def _output(self, logits: torch.Tensor, final: torch.Tensor, states: torch.Tensor, sampled: _Sampled) -> StepOutput:
        rows = sampled.rows
        output = StepOutput(
            rows=rows, token_ids=sampled.token_ids.astype(np.int32), draft_positions=sampled.draft_positions
        )
        if self.drafting is not None and self.drafting.needs_hidden_states:
            last = sampled.places[np.append(rows[1:] != rows[:-1], True)] if len(rows) else sampled.places
            output.hidden_states = states[torch.from_numpy(last).to(states.device)]
        if (self.rows.num_logprobs[rows] >= 0).any():
            output.logprobs = self._logprobs(logits if self.raw_logprobs else final, sampled)
        if self.count_nans:
            counts = self.staging.download(logits.isnan().sum(dim=-1))[sampled.places]
            output.num_nans = {int(row): int(counts[rows == row].sum()) for row in np.unique(rows[counts > 0])}
        return output

    def _logprobs(self, scores: torch.Tensor, sampled: _Sampled) -> dict[int, list[TokenLogprobs]]:
        wanted = np.flatnonzero(self.rows.num_logprobs[sampled.rows] >= 0)
        tops = self.rows.num_logprobs[sampled.rows[wanted]]
        index = torch.from_numpy(sampled.places[wanted]).to(scores.device)
        tokens = torch.from_numpy(sampled.token_ids[wanted]).to(scores.device)
        table = self._table(scores[index], tokens, int(tops.max()))
        entries: dict[int, list[TokenLogprobs]] = {}
        for i, row in enumerate(sampled.rows[wanted].tolist()):
            entries.setdefault(row, []).append(table.entry(i, int(tops[i])))
        return entries

    def _prompt_logprobs(self, inputs: StepInputs, hidden: torch.Tensor) -> dict[int, tuple[int, list[TokenLogprobs]]]:
        """Entries for the prompt tokens that follow this chunk's positions: position p scores token p + 1."""
        starts = inputs.batches[0].query_start_loc_cpu
        result = {}
        for i in np.flatnonzero(self.rows.num_prompt_logprobs[inputs.rows] >= 0).tolist():
            row, count = int(inputs.rows[i]), int(inputs.num_scheduled[i])
            first = int(inputs.batches[0].seq_lens_cpu[i]) - count
            count = min(count, int(self.rows.num_prompt_tokens[row]) - 1 - first)
            if count <= 0:
                continue
            targets = torch.from_numpy(self.rows.token_ids[row, first + 1 : first + 1 + count].astype(np.int64))
            chunk = hidden[int(starts[i]) : int(starts[i]) + count]
            top = int(self.rows.num_prompt_logprobs[row])
            result[row] = (first + 1, self._score(chunk, targets.to(hidden.device), top))
        return result

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor, top: int) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        for states, tokens in zip(
            hidden.split(_PROMPT_LOGITS_AT_A_TIME), targets.split(_PROMPT_LOGITS_AT_A_TIME), strict=True
        ):
            table = self._table(self.model.compute_logits(states), tokens, top)
            entries += [table.entry(i, top) for i in range(len(tokens))]
        return entries

    def _table(self, scores: torch.Tensor, tokens: torch.Tensor, top: int) -> LogprobTable:
        return gather_logprobs(scores, tokens, top, normalise=self.normalise_logprobs)
