"""The end of a step that pools: answers of the prompts that it completes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.step_output import ForwardOutput, StepOutput
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.plugins.pooling.gatherers import Gatherer
from slotline.registry.contracts import Pooler, PoolingParams
from slotline.registry.contracts.device import Download

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class PendingPooling:
    """Answers of pooling requests whose prompts a step completes, on their way to the host.

    Attributes:
        rows: [n] int64, permanent rows.
        vectors: [n, size] float32. None if no prompt is complete.
    """

    rows: Int
    vectors: Download | None


class PoolingHead:
    """Pooler of a step's hidden states. Implements `OutputHead`.

    Args:
        pooler: the model's.
        gatherer: gathers hidden states by the pooler's method.
        default: parameters of made-up requests in profiling and warm-up.
        runner: the step's runner.
    """

    def __init__(
        self, pooler: Pooler, gatherer: Gatherer, rows: RequestTable, default: PoolingParams, runner: ModelRunner
    ) -> None:
        self._pooler = pooler
        self._gatherer = gatherer
        self._rows = rows
        self._default = default
        self._runner = runner

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return the tokens [n] int64 whose hidden states `start` needs, or None for all."""
        return self._gatherer.wanted(inputs)

    @torch.inference_mode()
    def start(self, launched: ForwardOutput) -> PendingPooling:
        """Take in a step's hidden states of the `wanted` tokens, and start the answers of prompts it completes."""
        inputs, hidden = launched.inputs, launched.hidden
        rows = inputs.logits_rows
        with self._runner.profiler.scope("pool"):
            if launched.whole and (wanted := self.wanted(inputs)) is not None:
                hidden = hidden[wanted]
            states = self._gatherer.gather(inputs, hidden)  # [n, hidden_size] float32
            if len(rows) == 0:
                return PendingPooling(rows=rows, vectors=None)
            vectors = self._pooler.pool(states, [self._params(row) for row in rows.tolist()])
            return PendingPooling(rows=rows, vectors=self._runner.staging.download(vectors))

    def finish(self, pending: PendingPooling) -> StepOutput:
        """Wait for the answers and return the step's output. An answer with NaN is invalid."""
        if pending.vectors is None:
            return StepOutput()
        with self._runner.profiler.scope("wait"):
            vectors = pending.vectors.wait()
        rows = pending.rows.tolist()
        answers = dict(zip(rows, vectors, strict=True))
        counts = np.isnan(vectors).sum(axis=1)
        if not counts.any():
            return StepOutput(answers=answers)
        found = {row: count for row, count in zip(rows, counts.tolist(), strict=True) if count}
        return StepOutput(
            answers={row: vector for row, vector in answers.items() if row not in found},
            num_nans=found if self._runner.count_nans else {},
            failed=dict.fromkeys(found, self._runner.nan_cause()),
            spoiled=frozenset(found),
        )

    def _params(self, row: int) -> PoolingParams:
        request = self._rows.requests[row]  # None in profiling and warm-up
        params: PoolingParams | None = None if request is None else request.task_params
        return self._default if params is None else params
