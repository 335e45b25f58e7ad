"""Pooling: from the hidden states of prompts to one vector for each request, over as many steps as a prompt takes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slotline.builder.parts import Parts
from slotline.core.api.outputs import ClassificationOutput, EmbeddingOutput, PoolingOutput, PoolingRequestOutput
from slotline.core.batch.request import Request
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.core.scheduler.admission import other_task
from slotline.plugins.pooling.gatherers import GATHERERS
from slotline.plugins.pooling.head import PoolingHead
from slotline.registry.contracts import ExtensionContext, Pooler, PoolingParams
from slotline.registry.errors import ContractError

_OUTPUTS: Mapping[str | None, type[PoolingOutput]] = {"embed": EmbeddingOutput, "classify": ClassificationOutput}


class Pooling:
    """Pooling parameters of requests, and the pooler that ends each step.

    Raises:
        ContractError: if the model has no pooler, or a pooler that asks for an unknown method.
    """

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
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
        self.task = planned.task
        self._tasks = planned.facts.tasks
        self._pooler = pooler
        self._rows = parts.rows
        device = planned.hardware[context.device]
        self._gatherer = GATHERERS[pooler.method](parts.rows, planned.facts.hidden_size, device)

    def prepare_request(self, request: Request) -> None:
        """Complete a request's pooling parameters with the model's choices.

        Raises:
            RequestError: for another task than the engine's, for none, or for parameters that the model refuses.
        """
        params = request.task_params
        if params is None or params.task != self.task:
            raise other_task(params, self.task, self._tasks)
        request.task_params = self._pooler.adjust(params)
        request.samples = False
        request.whole_prompt |= self._gatherer.whole_prompt

    def output_head(self, runner: ModelRunner) -> PoolingHead:
        """Return the work that ends a step: pooling in place of sampling."""
        default = self._pooler.adjust(PoolingParams(task=self.task))
        return PoolingHead(self._pooler, self._gatherer, self._rows, default, runner)

    def output(self, request: Request) -> PoolingRequestOutput[PoolingOutput]:
        """Return the public form of a pooling request."""
        params, vector = request.task_params, request.answer
        kind = _OUTPUTS[params.task]
        return PoolingRequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=None if vector is None else kind(data=torch.from_numpy(vector[: params.dimensions])),
            finished=request.finished,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            metrics=request.metrics,
        )
