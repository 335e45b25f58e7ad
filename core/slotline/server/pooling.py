"""`/v1/embeddings`, `/v1/classify`, `/v1/score`, `/v1/rerank` and `/pooling`, for engines of these tasks."""

from __future__ import annotations

import base64
import time
from typing import Any

import torch
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from slotline.core.api.outputs import PoolingOutput, PoolingRequestOutput
from slotline.registry.contracts import TOKEN_TASKS, PoolingParams
from slotline.server.errors import HttpError
from slotline.server.fields import as_prompts
from slotline.server.http import gather_or_cancel, json_response
from slotline.server.pooling_fields import (
    Classification,
    Classified,
    ClassifyFields,
    Document,
    Embedding,
    EmbeddingFields,
    Embeddings,
    PairFields,
    Pooled,
    PooledList,
    PoolFields,
    PoolingFields,
    PoolingUsage,
    Ranked,
    Ranking,
    RerankFields,
    Score,
    ScoreFields,
    Scores,
)
from slotline.server.request_record import current_record
from slotline.server.state import ServerState, new_id


async def create_embedding(state: ServerState, request: Request) -> Response:
    """Answer with an embedding for each input.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if the request is wrong.
    """
    fields = await state.read(request, EmbeddingFields)
    params = PoolingParams(
        task="embed",
        dimensions=fields.dimensions,
        normalize=fields.normalize,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
    )
    prompts = as_prompts("input", fields.input)
    name, outputs = await _pooled(state, request, fields, prompts, params, fields.prompt_name)
    data = [Embedding(index=index, embedding=one) for index, one in enumerate(_written(outputs, fields))]
    return json_response(Embeddings(data=data, model=name, usage=_usage(outputs)))


async def create_classification(state: ServerState, request: Request) -> Response:
    """Answer with the probabilities of the classes for each input.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if the request is wrong.
    """
    fields = await state.read(request, ClassifyFields)
    params = PoolingParams(
        task="classify",
        use_activation=fields.use_activation,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
    )
    name, outputs = await _pooled(state, request, fields, as_prompts("input", fields.input), params)
    labels = state.labels
    data = []
    for index, vector in enumerate(_vectors(outputs)):
        best = int(vector.argmax())
        label = labels.get(best, str(best))
        data.append(Classified(index=index, label=label, probs=vector.tolist(), num_classes=len(vector)))
    return json_response(Classification(id=new_id("classify"), model=name, data=data, usage=_usage(outputs)))


async def create_pooling(state: ServerState, request: Request) -> Response:
    """Answer with what the task gives for each input: a vector, or one for each token.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if the request is wrong.
    """
    fields = await state.read(request, PoolFields)
    task = fields.task
    if task is None:
        form = state.llm.submitter.pooling_form
        task = next((one for one in TOKEN_TASKS if one in form.tasks), form.tasks[0])
    params = PoolingParams(
        task=task,
        dimensions=fields.dimensions,
        normalize=fields.normalize,
        use_activation=fields.use_activation,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
    )
    prompts = as_prompts("input", fields.input)
    name, outputs = await _pooled(state, request, fields, prompts, params, fields.prompt_name)
    data = [Pooled(index=index, data=one) for index, one in enumerate(_written(outputs, fields))]
    created = int(time.time())
    return json_response(PooledList(id=new_id("pool"), created=created, model=name, data=data, usage=_usage(outputs)))


async def create_score(state: ServerState, request: Request) -> Response:
    """Answer with the score of each pair of texts.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if the request is wrong.
    """
    fields = await state.read(request, ScoreFields)
    first = [fields.text_1] if isinstance(fields.text_1, str) else fields.text_1
    second = [fields.text_2] if isinstance(fields.text_2, str) else fields.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second) or not first:
        raise HttpError(400, f"{len(first)} texts against {len(second)}", param="text_1", code="invalid_value")
    name, scores, usage = await _scores(state, request, fields, first, second)
    data = [Score(index=index, score=score) for index, score in enumerate(scores)]
    return json_response(Scores(id=new_id("score"), model=name, data=data, usage=usage))


async def create_rerank(state: ServerState, request: Request) -> Response:
    """Answer with the documents in the order of their score with a query.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if the request is wrong.
    """
    fields = await state.read(request, RerankFields)
    documents = [one if isinstance(one, str) else one.text for one in fields.documents]
    if not documents:
        raise HttpError(400, "documents is an empty list", param="documents", code="invalid_value")
    if fields.top_n is not None and fields.top_n < 1:
        raise HttpError(400, f"top_n={fields.top_n} is below 1", param="top_n", code="invalid_value")
    name, scores, usage = await _scores(state, request, fields, [fields.query], documents)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.top_n]
    shown = fields.return_documents is not False
    results = [
        Ranked(index=one, relevance_score=scores[one], document=Document(documents[one]) if shown else UNSET)
        for one in order
    ]
    return json_response(Ranking(id=new_id("rerank"), model=name, results=results, usage=usage))


async def _scores(
    state: ServerState, request: Request, fields: PairFields, first: list[str], second: list[str]
) -> tuple[str, list[float], PoolingUsage]:
    """Return the model's name, the score of each pair, and the counts of tokens. Equal texts are computed once."""
    given = PoolingParams(use_activation=fields.use_activation, truncate_prompt_tokens=fields.truncate_prompt_tokens)
    asked = await state.llm.scoring(
        first, second, prompt_name=fields.prompt_name, instruction=fields.instruction, pooling_params=given
    )
    params = asked.params(given)
    name, outputs = await _pooled(state, request, fields, list(asked.prompts), params)
    found = [one.outputs for one in asked.outputs(outputs)]
    return name, [one.score for one in found if one is not None], _usage(outputs)


async def _pooled(
    state: ServerState,
    request: Request,
    fields: PoolingFields,
    prompts: list[dict[str, Any]],
    params: PoolingParams,
    prompt_name: str | None = None,
) -> tuple[str, list[PoolingRequestOutput[PoolingOutput]]]:
    """Return the model's name and the output of each prompt."""
    name, adapter = state.model(fields.model)
    state.admit(len(prompts))

    async def one(prompt: dict[str, Any]) -> PoolingRequestOutput[PoolingOutput]:
        prompt["priority"] = fields.priority or 0
        record = current_record()
        with record.prompt(prompt, state.llm.front.tokenizer):
            encoded = state.llm.encode(prompt, params, prompt_name=prompt_name, lora_request=adapter)
            (output,) = [output async for output in encoded]
        record.end(output)
        return output

    outputs = await state.answer(request, gather_or_cancel([one(prompt) for prompt in prompts]))
    for output in outputs:
        if output.outputs is None:
            raise HttpError(500, f"the request failed: {output.stop_reason}", "server_error", code="request_failed")
    return name, outputs


def _vectors(outputs: list[PoolingRequestOutput[PoolingOutput]]) -> list[torch.Tensor]:
    return [output.outputs.data for output in outputs if output.outputs is not None]


def _usage(outputs: list[PoolingRequestOutput[PoolingOutput]]) -> PoolingUsage:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return PoolingUsage(count, count)


def _written(
    outputs: list[PoolingRequestOutput[PoolingOutput]], fields: EmbeddingFields | PoolFields
) -> list[list[Any] | str]:
    """Return the outputs in the form that a request asks for."""
    found = _vectors(outputs)
    return [_base64(one) if fields.encoding_format == "base64" else one.tolist() for one in found]


def _base64(vector: torch.Tensor) -> str:
    return base64.b64encode(vector.float().contiguous().numpy().tobytes()).decode()
