"""The end of a step that pools: answers of the prompts that it completes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.step_output import ForwardOutput, StepOutput
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.plugins.pooling.gatherers import Gatherer
from slotline.plugins.pooling.token_answers import Chunk, chunks_of, collect, places_of
from slotline.registry.contracts import TOKEN_TASKS, Pooler, PoolingParams
from slotline.registry.contracts.device import Device, Download

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class PendingPooling:
    """Answers of a step's pooling requests, on their way to the host.

    Attributes:
        rows: [n] int64, permanent rows of the completed prompts with one vector.
        chunks: the tokens that have a vector each.
        vectors: [n + t, size] float32, those of the rows, then those of the t tokens. None if there are none.
    """

    rows: Int
    chunks: Sequence[Chunk]
    vectors: Download | None


class PoolingHead:
    """Pooler of a step's hidden states. Implements `OutputHead`.

    Args:
        pooler: the model's.
        gatherer: gathers hidden states by the pooler's method.
        defaults: by task, the parameters of made-up requests in profiling and warm-up.
        runner: the step's runner.
        device: has the hidden states.
    """

    def __init__(
        self,
        pooler: Pooler,
        gatherer: Gatherer,
        rows: RequestTable,
        defaults: Mapping[str, PoolingParams],
        runner: ModelRunner,
        device: Device,
    ) -> None:
        self._pooler = pooler
        self._gatherer = gatherer
        self._rows = rows
        self._defaults = defaults
        self._runner = runner
        self._device = device

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return the tokens [n] int64 whose hidden states `start` needs, or None for all."""
        return self._gatherer.wanted(inputs)

    @torch.inference_mode()
    def start(self, launched: ForwardOutput) -> PendingPooling:
        """Take in a step's hidden states of the `wanted` tokens, and start the answers of prompts it completes."""
        inputs, hidden = launched.inputs, launched.hidden
        with self._runner.profiler.scope("pool"):
            chosen = hidden
            if launched.whole and (wanted := self.wanted(inputs)) is not None:
                chosen = hidden[wanted]
            states = self._gatherer.gather(inputs, chosen)  # [n, hidden_size] float32
            if inputs.made_up:
                return self._try_all(states, hidden[: inputs.num_tokens])
            chunks = chunks_of(inputs, self._rows) if launched.whole else []
            return self._pool(inputs.logits_rows, chunks, states, hidden)

    def finish(self, pending: PendingPooling) -> StepOutput:
        """Wait for the answers and return the step's output. An answer with NaN is invalid."""
        if pending.vectors is None:
            return StepOutput()
        with self._runner.profiler.scope("wait"):
            vectors = pending.vectors.wait()
        count = len(pending.rows)
        answers = dict(zip(pending.rows.tolist(), vectors[:count], strict=True))
        answers |= collect(pending.chunks, vectors[count:])
        if not np.isnan(vectors).any() and not pending.chunks:
            return StepOutput(answers=answers)
        counts = {row: int(np.isnan(answer).sum()) for row, answer in answers.items()}
        found = {row: nans for row, nans in counts.items() if nans}
        return StepOutput(
            answers={row: vector for row, vector in answers.items() if row not in found},
            num_nans=found if self._runner.count_nans else {},
            failed=dict.fromkeys(found, self._runner.nan_cause()),
            spoiled=frozenset(found),
        )

    def _pool(self, rows: Int, chunks: Sequence[Chunk], states: torch.Tensor, hidden: torch.Tensor) -> PendingPooling:
        """Start the answers of completed prompts, by one call of the pooler and one copy to the host.

        Args:
            rows: [n] int64, permanent rows of the completed prompts.
            states: [n, hidden_size] float32, their pooled states.
            hidden: [num_padded_tokens, hidden_size] of all tokens, if there are chunks.
        """
        if chunks:
            by_token = {chunk.row for chunk in chunks}
            single = np.array([index for index, row in enumerate(rows.tolist()) if row not in by_token], np.int64)
            rows = rows[single]
            to_device = self._device.to_device
            states = torch.cat([states[to_device(single)], hidden[to_device(places_of(chunks))].float()])
        if not len(states):
            return PendingPooling(rows=rows, chunks=(), vectors=None)
        params = [self._params(row) for row in rows.tolist()]
        for chunk in chunks:
            params += [chunk.request.task_params] * chunk.count
        vectors = self._pooler.pool(states, params)
        return PendingPooling(rows=rows, chunks=chunks, vectors=self._runner.staging.download(vectors))

    def _try_all(self, states: torch.Tensor, hidden: torch.Tensor) -> PendingPooling:
        """Answer made-up requests by every task, so that all kernels are there and the largest answers fit.

        Args:
            states: [n, hidden_size] float32, the pooled states of the completed prompts.
            hidden: [num_tokens, hidden_size] of all tokens, or of fewer if no task has a vector for each.
        """
        largest: torch.Tensor | None = None
        for task, params in self._defaults.items():
            inputs = hidden.float() if task in TOKEN_TASKS else states
            if len(inputs):
                vectors = self._pooler.pool(inputs, [params] * len(inputs))
                largest = vectors if largest is None or vectors.numel() > largest.numel() else largest
        arriving = None if largest is None else self._runner.staging.download(largest)
        return PendingPooling(rows=np.arange(0), chunks=(), vectors=arriving)

    def _params(self, row: int) -> PoolingParams:
        """Return the parameters of a row's request, or some if it was aborted since."""
        request = self._rows.requests[row]
        params: PoolingParams | None = None if request is None else request.task_params
        return next(iter(self._defaults.values())) if params is None else params
