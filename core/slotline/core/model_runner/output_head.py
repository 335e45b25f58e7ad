"""What ends a step: `OutputHead`, and the one that samples."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve

from slotline.core.batch.logprobs import PendingLogprobs, PendingPrompts, ScoredPlaces, pack_logprobs
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.step_output import ForwardOutput, PendingSample, StepOutput
from slotline.core.device.transfer_buffer import Download
from slotline.core.sampling.logits_processors import Processed, ProcessorPipeline
from slotline.core.sampling.nan_logits import NAN_LOGITS, marked_nan
from slotline.core.sampling.sampler import sample_checked
from slotline.registry.contracts import TokenSampler

if TYPE_CHECKING:
    from slotline.core.model_runner.model_runner import ModelRunner

Int = npt.NDArray[np.int64]
_NONE_SPOILED: frozenset[int] = frozenset()
_PROMPT_LOGITS_AT_A_TIME = 256  # rows of the vocabulary, to bound the memory of prompt log-probabilities


class OutputHead(Protocol):
    """Work after a forward pass, which ends a step.

    If it may take more memory than a made-up step does, the head has `rehearse(num_rows, vocab_size, device)` too,
    which takes that much, and raises `CapacityError` if it does not fit.
    """

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return the tokens [n] int64 whose hidden states `start` needs, or None for all."""
        ...

    def start(self, launched: ForwardOutput) -> Any:
        """Start the work after a forward pass, without waiting for the device. Return what `finish` waits for."""
        ...

    def finish(self, pending: Any) -> StepOutput:
        """Wait for the results of a step."""
        ...


class SamplingHead:
    """Logits, processors, draws and log-probabilities of a step. Implements `OutputHead`.

    Attributes:
        plain_draws: draws the tokens of steps that ask for nothing else, where the device has a way of its own and
            steps verify no tokens.
    """

    def __init__(
        self, runner: ModelRunner, pipeline: ProcessorPipeline, logprobs_mode: str, plain_draws: TokenSampler | None
    ) -> None:
        self.runner = runner
        self.model = runner.model
        self.rows = runner.rows
        self.pipeline = pipeline
        self.staging = runner.staging
        self.profiler = runner.profiler
        self.last_tokens = runner.last_tokens
        self.ops = runner.ops
        self.count_nans = runner.count_nans
        self.extensions = runner.extensions
        self.plain_draws = plain_draws
        self.expect_rows = getattr(plain_draws, "expect", lambda _: None)
        when, _, what = logprobs_mode.partition("_")
        self.raw_logprobs = when == "raw"
        self.normalise_logprobs = what == "logprobs"

    wanted: Callable[[ModelInputs], torch.Tensor | None] = staticmethod(attrgetter("logits_indices"))  # one call less

    @torch.inference_mode()
    def start(self, launched: ForwardOutput) -> PendingSample:
        """Start the work after the forward pass: logits, processors, draws and their download.

        All earlier tokens must be known, since processors read them.
        """
        inputs, sampling, scope = launched.inputs, launched.inputs.sampling, self.profiler.scope
        plain_draws = self.plain_draws if self._draws_plainly(inputs, whole=launched.whole) else None
        if plain_draws is not None and not self.pipeline.has_work(sampling.rows, all_greedy=sampling.all_greedy):
            return self._draw_plainly(launched, plain_draws, launched.logits if inputs.all_sample else None)
        with scope("logits"):
            states, logits = self._wanted(launched)
        with scope("process"):
            processed = self.pipeline.apply(
                logits,
                sampling.rows,
                inputs.spec_positions,
                all_greedy=sampling.all_greedy,
                spec_paths=inputs.spec_paths,
                keep_raw=inputs.scored is not None,
            )
        if plain_draws is not None and processed.touched is None:
            return self._draw_plainly(launched, plain_draws, processed.logits)
        for process in self.extensions.process:
            processed = process(processed, inputs)
        if self.extensions.process_logits:
            processed = self._processed_further(processed, inputs)
        with scope("sample"):
            keep_final = not self.raw_logprobs and inputs.scored is not None
            for wants in self.extensions.wants_final_logits:
                keep_final = keep_final or wants(inputs)
            drawn = sample_checked(processed.logits, sampling, inputs.sampling_params, self.ops, keep_final=keep_final)
            tokens, final = drawn.tokens, drawn.final
            for revise in self.extensions.revise_tokens:
                tokens = revise(tokens, final, inputs)
            extras = {name: keep(launched, states) for name, keep in self.extensions.keep_states}
            if self.last_tokens is not None and inputs.stand_ins is not None:
                self.last_tokens.record(inputs.stand_ins, tokens)
            sampled = tokens
            if processed.touched is not None:
                sampled = processed.mark(tokens, self.ops, all_greedy=inputs.sampling_params is None)
            if drawn.holds_nan is not None:
                sampled = marked_nan(sampled, drawn.holds_nan, marks=processed.touched is not None)
            arriving = self.staging.download(sampled)
            num_nans = self.staging.download(logits.isnan().sum(dim=-1)) if self.count_nans else None
        with scope("output"):
            scores = logits if self.raw_logprobs or final is None else final
            pending = PendingSample(
                batch=sampling,
                spec_positions=inputs.spec_positions,
                tokens=arriving,
                sampled=sampled,
                extras=extras,
                errors=processed.errors,
                num_nans=num_nans,
                logprobs=None if inputs.scored is None else self._logprobs(scores, tokens, inputs.scored),
                prompt_logprobs=self._prompt_logprobs(launched) if launched.whole and not inputs.made_up else None,
            )
        for listener in self.extensions.after_sample:
            listener(pending)
        return pending

    def _processed_further(self, processed: Processed, inputs: ModelInputs) -> Processed:
        """Return the processed logits as the extensions leave them."""
        logits = processed.logits
        for process in self.extensions.process_logits:
            logits = process(logits, inputs)
        return evolve(processed, logits=logits, touched=np.ones(len(logits), bool))

    def finish(self, sampling: PendingSample) -> StepOutput:
        """Wait for a step's tokens, and keep the accepted ones."""
        with self.profiler.scope("wait"):
            token_ids = sampling.tokens.wait()
        rows, positions, num_kept = sampling.batch.rows, sampling.spec_positions, None
        places = np.arange(len(rows))
        if positions is not None:
            for accept in self.extensions.accept_tokens:
                places, num_kept = accept(sampling, token_ids)
            rows, token_ids, positions = rows[places], token_ids[places], positions[places]
        failed: dict[int, str] = {}
        spoiled = _NONE_SPOILED
        num_nans = {} if sampling.num_nans is None else _nans_by_row(sampling.num_nans, places, rows)
        if (token_ids < 0).any():
            errors = [sampling.errors.get(place) for place in places.tolist()]
            restrictions = self.extensions.restrictions
            failed = self.pipeline.failures(rows, token_ids, errors, restrictions, self.runner.nan_cause())
            spoiled = frozenset(rows[token_ids == NAN_LOGITS].tolist())
            given = token_ids >= 0
            places, rows, token_ids = places[given], rows[given], token_ids[given]
            positions, num_kept = (None if values is None else values[given] for values in (positions, num_kept))
        return StepOutput(
            rows=rows,
            token_ids=token_ids.astype(np.int32),
            places=places,
            spec_positions=positions,
            num_kept=num_kept,
            extras=sampling.extras,
            logprobs={} if sampling.logprobs is None else sampling.logprobs.by_row(places, rows),
            prompt_logprobs={} if sampling.prompt_logprobs is None else sampling.prompt_logprobs.by_row(),
            num_nans=num_nans,
            failed=failed,
            spoiled=spoiled,
        )

    def _draws_plainly(self, inputs: ModelInputs, *, whole: bool) -> bool:
        """Return True if a step needs nothing but plain draws, unless processors need more."""
        if inputs.stand_ins is None or inputs.scored is not None or whole or self.count_nans:
            return False
        return not self.extensions.process_logits and all(leaves(inputs) for leaves in self.extensions.leaves_logits)

    def _draw_plainly(self, launched: ForwardOutput, draws: TokenSampler, logits: torch.Tensor | None) -> PendingSample:
        """Draw the tokens of a step with the fast sampler. Without logits [n or more, vocab_size], compute them."""
        inputs, graphs = launched.inputs, launched.logits
        assert inputs.stand_ins is not None
        if logits is None:
            with self.profiler.scope("logits"):
                _, logits = self._wanted(launched)
        for ban in self.extensions.ban_tokens:
            logits = ban(logits, inputs)
        with self.profiler.scope("sample"):
            captured = graphs is not None and logits.data_ptr() == graphs.data_ptr()  # where a graph left them
            self.expect_rows(inputs.sampling)
            tokens, arriving = draws(logits, inputs.sampling_params, inputs.stand_ins, captured=captured)
        return PendingSample(batch=inputs.sampling, spec_positions=None, tokens=arriving, sampled=tokens)

    def _wanted(self, launched: ForwardOutput) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and logits [num_logits, ...] of the tokens that sample."""
        inputs, hidden, logits = launched.inputs, launched.hidden, launched.logits
        if inputs.shape is None and not launched.whole:
            return hidden, self._compute_logits(hidden, inputs, inputs.logits_indices)
        wanted = slice(len(inputs.logits_rows)) if inputs.all_sample else inputs.logits_indices
        states = hidden[wanted]
        if logits is None:
            return states, self._compute_logits(states, inputs, inputs.logits_indices)
        return states, logits[wanted]

    def _compute_logits(self, states: torch.Tensor, inputs: ModelInputs, indices: torch.Tensor) -> torch.Tensor:
        """Compute logits of the hidden states of some of the step's tokens."""
        for plan in self.extensions.plan_logits:
            plan(inputs, indices)
        return self.model.compute_logits(states)

    def _logprobs(self, scores: torch.Tensor, tokens: torch.Tensor, scored: ScoredPlaces) -> PendingLogprobs:
        """Start scoring the sampled tokens of the places that ask for it."""
        packed = self._pack(scores[scored.index], tokens[scored.index], int(scored.tops.max()))
        return PendingLogprobs(scored=scored, packed=self.staging.download(packed))

    def _prompt_logprobs(self, launched: ForwardOutput) -> PendingPrompts | None:
        """Score the prompt tokens that follow this chunk's positions: position p scores token p + 1.

        The scores stay on the device until a prompt's last chunk. Those of all prompts that end arrive in one copy.
        """
        inputs, ended = launched.inputs, dict[int, torch.Tensor]()
        for i in np.flatnonzero(self.rows.num_prompt_logprobs[inputs.rows] >= 0).tolist():
            row, start = int(inputs.rows[i]), int(inputs.query_start_loc_cpu[i])
            first = int(inputs.seq_lens_cpu[i] - inputs.num_scheduled[i]) + 1
            end = min(int(inputs.seq_lens_cpu[i]) + 1, length := int(self.rows.num_prompt_tokens[row]))
            if first < end:
                kept = self.rows.request(row).inputs
                known: list[torch.Tensor] = [] if first == 1 else kept["prompt_scores"]
                targets = self.rows.token_ids[row, first:end].astype(np.int64)
                known += self._score(inputs, launched.hidden, start, targets, int(self.rows.num_prompt_logprobs[row]))
                kept["prompt_scores"] = known
                if end == length:
                    ended[row] = torch.cat(kept.pop("prompt_scores"))
        if not ended:
            return None
        packed = self.staging.download(torch.cat([one.flatten() for one in ended.values()]))
        return PendingPrompts(shapes={row: one.shape for row, one in ended.items()}, packed=packed)

    def _score(
        self, inputs: ModelInputs, hidden: torch.Tensor, start: int, targets: Int, top: int
    ) -> list[torch.Tensor]:
        """Score `targets` [n] by the hidden states of the step's tokens from `start` on, some at a time."""
        places = torch.arange(start, start + len(targets), device=hidden.device)
        there = torch.from_numpy(targets).to(hidden.device, non_blocking=True)
        each = (one.split(_PROMPT_LOGITS_AT_A_TIME) for one in (hidden[start : start + len(targets)], places, there))
        pieces = zip(*each, strict=True)
        return [self._pack(self._compute_logits(states, inputs, at), tokens, top) for states, at, tokens in pieces]

    def _pack(self, scores: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
        return pack_logprobs(scores, tokens, top, normalise=self.normalise_logprobs)


def _nans_by_row(num_nans: Download, places: Int, rows: Int) -> dict[int, int]:
    """Return how many NaN the logits at `places` [n] have, by row, of rows with any."""
    counts = num_nans.wait()[places]
    return {int(row): int(counts[rows == row].sum()) for row in np.unique(rows[counts > 0])}
