"""Pooling: from the hidden states of prompts to the answer of each request, over as many steps as a prompt takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.builder.parts import Parts
from slotline.core.api.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.core.scheduler.admission import other_task
from slotline.plugins.pooling.gatherers import GATHERERS
from slotline.plugins.pooling.head import PoolingHead
from slotline.plugins.pooling.token_answers import asks_for_tokens
from slotline.plugins.pooling.token_types import TokenTypes
from slotline.registry.contracts import (
    TOKEN_TASKS,
    ExtensionContext,
    PooledTexts,
    Pooler,
    PoolingForm,
    PoolingParams,
    ScoreType,
)
from slotline.registry.errors import ContractError, RequestError

_OUTPUTS: Mapping[str | None, type[PoolingOutput]] = {
    "embed": EmbeddingOutput,
    "classify": ClassificationOutput,
    "score": ScoringOutput,
}


class Pooling:
    """Pooling parameters of requests, and the pooler that ends each step.

    Attributes:
        form: what callers know of the engine's tasks.
        notes: the tasks, in words.

    Raises:
        ContractError: if the model has no pooler, or a pooler that asks for an unknown method or serves no task.
    """

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        planned = parts.planned
        pooler = _pooler_of(parts)
        self.task = planned.task
        self._tasks = planned.facts.tasks
        self._pooler = pooler
        self._rows = parts.rows
        self._device = planned.hardware[context.device]
        self._gatherer = GATHERERS[pooler.method](parts.rows, planned.facts.hidden_size, self._device)
        types = planned.facts.token_types > 1 and bool(planned.family_descriptor.capabilities.token_types.support)
        self._types = TokenTypes(parts.rows.max_requests, types, planned.hardware[planned.stages.stages[0].device])
        self._by_token = np.zeros(parts.rows.max_requests, bool)
        self.form = form_of(pooler, planned.task, token_types=types)
        if not self.form.tasks:
            raise ContractError("a pooler serves no task", fix="tell the author of the plugin")
        self.notes = (f"pooling: requests may ask for {', '.join(self.form.tasks)}",)
        self._any_tokens = not {*TOKEN_TASKS}.isdisjoint(self.form.tasks)

    def prepare_request(self, request: Request) -> None:
        """Complete a request's pooling parameters with the model's choices.

        Raises:
            RequestError: for a task that the engine does not serve, for none, or for parameters that the model refuses.
        """
        params = request.task_params
        if params is None or params.task not in self.form.tasks:
            if params is not None and params.task in self.form.refusals:
                raise RequestError(
                    f"a request for the task {params.task!r} cannot run: {self.form.refusals[params.task]}",
                    fix=f"ask for {' or '.join(map(repr, self.form.tasks))}, or take a model that serves it",
                )
            raise other_task(params, self.task, self._tasks)
        request.task_params = self._pooler.adjust(params)
        request.samples = False
        request.whole_prompt |= self._gatherer.whole_prompt or asks_for_tokens(request)

    def validate(self, request: Request) -> None:
        """Check the types of a request's tokens.

        Raises:
            RequestError: if the model does not read them.
        """
        self._types.validate(request)

    def begin_request(self, request: Request, computed: int) -> None:
        """Note what a request wants of its steps."""
        self._by_token[request.row] = asks_for_tokens(request)
        self._types.begin(request)

    def wants_all_hidden(self, inputs: ModelInputs) -> bool:
        """Return True if a request of the step has a vector for each token, or if all tasks are tried."""
        return self._any_tokens and (inputs.made_up or bool(self._by_token[inputs.rows].any()))

    def needs_eager(self, scheduled: SchedulerOutput) -> bool:
        """Return True if tokens are of several types, since captured passes take none."""
        return self._types.in_step(scheduled.rows)

    def forward_kwargs(self, inputs: ModelInputs) -> Mapping[str, torch.Tensor]:
        """Return the types of a step's tokens, if there are several."""
        return self._types.arguments(inputs)

    def capture_kwargs(self, inputs: ModelInputs, broken: frozenset[str], cut: Any) -> Mapping[str, Any]:
        """Return nothing: steps with several types of tokens run eagerly."""
        return {}

    def output_head(self, runner: ModelRunner) -> PoolingHead:
        """Return the work that ends a step: pooling in place of sampling."""
        defaults = {task: self._pooler.adjust(PoolingParams(task=task)) for task in self.form.tasks}
        return PoolingHead(self._pooler, self._gatherer, self._rows, defaults, runner, self._device)

    def output(self, request: Request) -> PoolingRequestOutput[PoolingOutput]:
        """Return the public form of a pooling request."""
        params, vector = request.task_params, request.answer
        kind = _OUTPUTS.get(params.task, PoolingOutput)
        return PoolingRequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=None if vector is None else kind(data=torch.from_numpy(vector[..., : params.dimensions])),
            finished=request.finished,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            metrics=request.metrics,
        )


def form_of(pooler: Pooler, task: str, *, token_types: bool) -> PoolingForm:
    """Return what callers know of an engine with this pooler."""
    tasks = tuple(getattr(pooler, "tasks", (task,)))
    score_type: ScoreType | None = None
    if "score" in tasks:
        score_type = "cross-encoder"
    elif "embed" in tasks:
        score_type = "bi-encoder"
    elif "token_embed" in tasks:
        score_type = "late-interaction"
    refusals = dict(getattr(pooler, "refusals", {}))
    texts = getattr(pooler, "texts", PooledTexts())
    return PoolingForm(tasks=tasks, score_type=score_type, refusals=refusals, token_types=token_types, texts=texts)


def _pooler_of(parts: Parts) -> Pooler:
    """Return the model's pooler.

    Raises:
        ContractError: if there is none, or if it asks for an unknown method.
    """
    planned = parts.planned
    pooler: Pooler | None = getattr(parts.model, "pooler", None)
    if pooler is None:
        raise ContractError(
            f"model family {planned.family_descriptor.name!r} offers the task {planned.task!r}, and its model has "
            "no pooler",
            fix="tell the author of the plugin",
        )
    if pooler.method not in GATHERERS:
        raise ContractError(
            f"a pooler asks for the pooling {pooler.method!r}", fix=f"use one of {', '.join(GATHERERS)}"
        )
    return pooler
