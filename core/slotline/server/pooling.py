"""`/v1/embeddings`, `/v1/classify`, `/v1/score` and `/v1/rerank`, for engines of these tasks."""

from __future__ import annotations

import base64
from typing import Any, Literal

import torch
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from slotline.core.api.outputs import PoolingOutput, PoolingRequestOutput
from slotline.registry.contracts import PoolingParams
from slotline.server.errors import HttpError
from slotline.server.fields import Fields, Prompts, as_prompts
from slotline.server.http import gather_or_cancel, json_response
from slotline.server.state import ServerState, new_id


class PoolingFields(Fields, kw_only=True):
    """What requests of these endpoints share."""

    model: str | None = None
    user: str | None = None
    priority: int | None = None


class EmbeddingFields(PoolingFields):
    """The body of `/v1/embeddings`."""

    input: Prompts
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None


class ClassifyFields(PoolingFields):
    """The body of `/v1/classify`."""

    input: Prompts
    use_activation: bool | None = None


class ScoreFields(PoolingFields):
    """The body of `/v1/score`: one text against one or many, or pairs."""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankFields(PoolingFields):
    """The body of `/v1/rerank`."""

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool | None = None


class Embedding(Struct, kw_only=True):
    """The embedding of an input."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


async def create_embedding(state: ServerState, request: Request) -> Response:
    """Answer with an embedding for each input.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if the request is wrong.
    """
    fields = await state.read(request, EmbeddingFields)
    params = PoolingParams(task="embed", dimensions=fields.dimensions, normalize=fields.normalize)
    name, outputs = await _pooled(state, request, fields, as_prompts("input", fields.input), params)
    as_text = fields.encoding_format == "base64"
    data = [
        Embedding(index=index, embedding=_base64(one) if as_text else one.tolist())
        for index, one in enumerate(_vectors(outputs))
    ]
    return json_response({"object": "list", "data": data, "model": name, "usage": _usage(outputs)})


async def create_classification(state: ServerState, request: Request) -> Response:
    """Answer with the probabilities of the classes for each input.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if the request is wrong.
    """
    fields = await state.read(request, ClassifyFields)
    params = PoolingParams(task="classify", use_activation=fields.use_activation)
    name, outputs = await _pooled(state, request, fields, as_prompts("input", fields.input), params)
    labels = state.labels
    data = []
    for index, vector in enumerate(_vectors(outputs)):
        best = int(vector.argmax())
        label = labels.get(best, str(best))
        data.append({"index": index, "label": label, "probs": vector.tolist(), "num_classes": len(vector)})
    answer = {"id": new_id("classify"), "object": "list", "model": name, "data": data, "usage": _usage(outputs)}
    return json_response(answer)


async def create_score(state: ServerState, request: Request) -> Response:
    """Answer with the similarity of each pair of texts: the cosine of their embeddings.

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
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return json_response({"id": new_id("score"), "object": "list", "model": name, "data": data, "usage": usage})


async def create_rerank(state: ServerState, request: Request) -> Response:
    """Answer with the documents in the order of their similarity to a query.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if the request is wrong.
    """
    fields = await state.read(request, RerankFields)
    if not fields.documents:
        raise HttpError(400, "documents is an empty list", param="documents", code="invalid_value")
    if fields.top_n is not None and fields.top_n < 1:
        raise HttpError(400, f"top_n={fields.top_n} is below 1", param="top_n", code="invalid_value")
    queries = [fields.query] * len(fields.documents)
    name, scores, usage = await _scores(state, request, fields, queries, fields.documents)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if fields.return_documents is not False:
        results = [{**one, "document": {"text": fields.documents[one["index"]]}} for one in results]
    return json_response({"id": new_id("rerank"), "model": name, "results": results, "usage": usage})


async def _scores(
    state: ServerState, request: Request, fields: PoolingFields, first: list[str], second: list[str]
) -> tuple[str, list[float], dict[str, int]]:
    """Return the model's name, the cosine of each pair, and the counts of tokens. Equal texts are computed once."""
    texts = list(dict.fromkeys([*first, *second]))
    params = PoolingParams(task="embed")
    name, outputs = await _pooled(state, request, fields, [{"prompt": text} for text in texts], params)
    vectors = dict(zip(texts, _vectors(outputs), strict=True))
    cosine = torch.nn.functional.cosine_similarity
    return (
        name,
        [float(cosine(vectors[a], vectors[b], dim=0)) for a, b in zip(first, second, strict=True)],
        _usage(outputs),
    )


async def _pooled(
    state: ServerState, request: Request, fields: PoolingFields, prompts: list[dict[str, Any]], params: PoolingParams
) -> tuple[str, list[PoolingRequestOutput[PoolingOutput]]]:
    """Return the model's name and the output of each prompt."""
    name, adapter = state.model(fields.model)
    state.admit(len(prompts))

    async def one(prompt: dict[str, Any]) -> PoolingRequestOutput[PoolingOutput]:
        prompt["priority"] = fields.priority or 0
        (output,) = [output async for output in state.llm.encode(prompt, params, lora_request=adapter)]
        return output

    outputs = await state.answer(request, gather_or_cancel([one(prompt) for prompt in prompts]))
    for output in outputs:
        if output.outputs is None:
            raise HttpError(500, f"the request failed: {output.stop_reason}", "server_error", code="request_failed")
    return name, outputs


def _vectors(outputs: list[PoolingRequestOutput[PoolingOutput]]) -> list[torch.Tensor]:
    return [output.outputs.data for output in outputs if output.outputs is not None]


def _usage(outputs: list[PoolingRequestOutput[PoolingOutput]]) -> dict[str, int]:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": count, "total_tokens": count}


def _base64(vector: torch.Tensor) -> str:
    return base64.b64encode(vector.float().contiguous().numpy().tobytes()).decode()
