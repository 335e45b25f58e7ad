"""Pooling: from the hidden states of prompts to one vector for each request, over as many steps as a prompt takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.api.outputs import ClassificationOutput, EmbeddingOutput, PoolingOutput, PoolingRequestOutput
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.step_output import PendingPooling
from slotline.core.device.async_copy import to_device
from slotline.core.device.transfer_buffer import TransferBuffer
from slotline.registry.contracts import Pooler, PoolingParams
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import ContractError, RequestError

if TYPE_CHECKING:
    from slotline.core.batch.request import Request

Int = npt.NDArray[np.int64]
UNSAMPLED = SamplingParams(max_tokens=1, detokenize=False)
"""Sampling parameters of a request that samples nothing."""
_OUTPUTS: Mapping[str | None, type[PoolingOutput]] = {"embed": EmbeddingOutput, "classify": ClassificationOutput}


class Pooling:
    """Gathers hidden states by the pooler's method and asks it for answers.

    Args:
        task: of the engine.
        pooler: the model's.
        hidden_size: of the model.
        device: torch device string, where states are kept between the chunks of a prompt.

    Raises:
        ContractError: if the pooler asks for an unknown method.
    """

    def __init__(
        self, task: str, pooler: Pooler, rows: RequestTable, staging: TransferBuffer, *, hidden_size: int, device: str
    ) -> None:
        if pooler.method not in _GATHERERS:
            raise ContractError(
                f"a pooler asks for the pooling {pooler.method!r}", fix=f"use one of {', '.join(_GATHERERS)}"
            )
        self.task = task
        self._pooler = pooler
        self._rows = rows
        self._gatherer = _GATHERERS[pooler.method](rows, hidden_size, device)
        self._staging = staging
        self._default = pooler.adjust(PoolingParams(task=task))

    @property
    def whole_prompt(self) -> bool:
        """True if every position of a prompt must be computed, so that no cached prefix may be taken."""
        return self._gatherer.whole_prompt

    def adjust(self, params: PoolingParams) -> PoolingParams:
        """Return a request's parameters, completed with the model's choices.

        Raises:
            RequestError: if the model cannot serve them.
        """
        return self._pooler.adjust(params)

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return the tokens [n] int64 whose hidden states `run` needs, or None for all."""
        return self._gatherer.wanted(inputs)

    def run(self, inputs: ModelInputs, hidden: torch.Tensor) -> PendingPooling:
        """Take in a step's hidden states of the `wanted` tokens, and start the answers of prompts it completes."""
        states = self._gatherer.gather(inputs, hidden)  # [n, hidden_size] float32
        if len(inputs.logits_rows) == 0:
            return PendingPooling(rows=inputs.logits_rows, vectors=None)
        vectors = self._pooler.pool(states, [self._params(row) for row in inputs.logits_rows.tolist()])
        return PendingPooling(rows=inputs.logits_rows, vectors=self._staging.download(vectors))

    def _params(self, row: int) -> PoolingParams:
        request = self._rows.requests[row]  # None in profiling and warm-up
        return self._default if request is None or request.pooling_params is None else request.pooling_params


class Gatherer(Protocol):
    """Pools the hidden states of requests over their chunks."""

    whole_prompt: bool

    def __init__(self, rows: RequestTable, hidden_size: int, device: str) -> None: ...

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """See `Pooling.wanted`."""
        ...

    def gather(self, inputs: ModelInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Return the pooled states [n, hidden_size] float32 of the requests in `inputs.logits_rows`."""
        ...


class LastToken:
    """The last token's state: it is in the step that completes the prompt, so nothing is kept."""

    whole_prompt = False

    def __init__(self, rows: RequestTable, hidden_size: int, device: str) -> None:
        """Do nothing, as there is nothing to prepare."""

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return the last token of each completed prompt."""
        return inputs.logits_indices

    def gather(self, inputs: ModelInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states in float32."""
        return hidden.float()


class _Kept:
    """States of the earlier chunks of requests, by permanent row: [max_requests, hidden_size] float32 on the device."""

    def __init__(self, rows: RequestTable, hidden_size: int, device: str) -> None:
        self._states = torch.zeros((rows.max_requests, hidden_size), device=device)

    def update(self, inputs: ModelInputs, merge: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Keep the result of `merge` for the step's requests. Return that of the completed ones [n, hidden_size].

        `merge` gets the kept states [num_requests, hidden_size] and whether each had begun [num_requests, 1]. A request
        that starts over after preemption has not begun: the states of its first attempt, or of another request, do not
        count.
        """
        states = self._states
        begun = to_device(inputs.seq_lens_cpu[: len(inputs.rows)] > inputs.num_scheduled, states.device)
        rows = to_device(inputs.rows, states.device)
        states[rows] = merge(states[rows], begun[:, None])
        return states[to_device(inputs.logits_rows, states.device)]


class FirstToken:
    """The first token's state, kept until the prompt is complete."""

    whole_prompt = True

    def __init__(self, rows: RequestTable, hidden_size: int, device: str) -> None:
        self._kept = _Kept(rows, hidden_size, device)

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return the first token of each chunk."""
        return inputs.query_start_loc[: len(inputs.rows)].long()

    def gather(self, inputs: ModelInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states of each prompt's first chunk."""
        states = hidden.float()  # [num_requests, hidden_size]
        return self._kept.update(inputs, lambda kept, begun: torch.where(begun, kept, states))


class Mean:
    """The mean over the prompt's tokens: sums are kept until it is complete."""

    whole_prompt = True

    def __init__(self, rows: RequestTable, hidden_size: int, device: str) -> None:
        self._kept = _Kept(rows, hidden_size, device)
        self._rows = rows

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return None: all tokens are needed."""
        return None

    def gather(self, inputs: ModelInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Sum the step's states by request and add those of its earlier chunks, all in float32."""
        counts = to_device(inputs.num_scheduled, hidden.device)
        # `unsafe` leaves out a check of the counts that would wait for the device.
        sums = torch.segment_reduce(hidden[: inputs.num_tokens].float(), "sum", lengths=counts, axis=0, unsafe=True)
        done = self._kept.update(inputs, lambda kept, begun: torch.where(begun, kept, 0.0) + sums)
        lengths = np.maximum(self._rows.num_tokens[inputs.logits_rows], 1)  # dummy rows have no tokens
        return done / to_device(lengths, hidden.device)[:, None]


_GATHERERS: Mapping[str, type[Gatherer]] = {"last": LastToken, "cls": FirstToken, "mean": Mean}


def params_by_task(
    params: SamplingParams | PoolingParams, pooling: Pooling | None, tasks: Sequence[str]
) -> tuple[SamplingParams, PoolingParams | None]:
    """Return the sampling and the pooling parameters of a request, if the engine runs that task.

    Args:
        params: the request's.
        pooling: of the engine, None if it generates.
        tasks: the model's tasks. An engine runs one of them.

    Raises:
        RequestError: for another task than the engine's, for none, or for parameters that the model refuses.
    """
    runs = "generate" if pooling is None else pooling.task
    asked = "generate" if isinstance(params, SamplingParams) else params.task
    if asked != runs:
        raise _other_task(asked, runs, tasks)
    if isinstance(params, SamplingParams):
        return params, None
    assert pooling is not None  # the task is not `generate`
    return UNSAMPLED, pooling.adjust(params)


def _other_task(asked: str | None, runs: str, tasks: Sequence[str]) -> RequestError:
    serves = f"the model serves {', '.join(tasks)}, and this engine runs {runs!r}"
    if asked is None:
        return RequestError(f"PoolingParams.task is missing; {serves}", fix=f"give PoolingParams(task={runs!r})")
    elsewhere = f'build an engine with task = "{asked}"' if asked in tasks else "take a model that serves it"
    return RequestError(
        f"a request for the task {asked!r} cannot run: {serves}", fix=f"{elsewhere}, or ask for {runs!r}"
    )


def pooling_output(request: Request) -> PoolingRequestOutput[PoolingOutput]:
    """Return the public form of a pooling request."""
    params, vector = request.pooling_params, request.pooled
    assert params is not None
    return PoolingRequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=None if vector is None else _OUTPUTS[params.task](data=torch.from_numpy(vector[: params.dimensions])),
        finished=request.finished,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        metrics=request.metrics,
    )
