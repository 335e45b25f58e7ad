"""`/openapi.json`: the OpenAPI document of the server, generated from the types of its bodies and answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from importlib.metadata import version as version_of
from typing import Any

import msgspec
from attrs import field, frozen

from slotline.server import (
    audio_fields,
    chat,
    completions,
    engine_view,
    health,
    messages,
    messages_fields,
    models,
    profile,
    responses,
    scale,
    tokens,
)
from slotline.server import pooling_fields as pooling
from slotline.server import responses_fields as response
from slotline.server.errors import AnthropicErrorBody, ErrorBody, status_text
from slotline.server.metrics import CONTENT_TYPE
from slotline.server.ranges import INSTEAD

Json = dict[str, Any]
_JSON, _FORM = "application/json", "multipart/form-data"
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@frozen
class Access:
    """Route of the application with its path, its method, and who may call it.

    Attributes:
        path: as Starlette writes it.
        open_to_all: whether no key is asked for.
        admin: whether an admin's key is asked for.
        anthropic: whether errors have Anthropic's form.
    """

    path: str
    method: str
    open_to_all: bool = field(kw_only=True)
    admin: bool = field(kw_only=True)
    anthropic: bool = field(kw_only=True)


@frozen
class Endpoint:
    """Description of a path.

    Attributes:
        summary: what it does.
        body: type of the request's body, None if there is none.
        body_required: whether an empty body is refused.
        body_type: content type of the request's body.
        answer: type of the answer with status 200, None for text.
        event: type of an event of a stream, None if it has no streams.
        text: content type of an answer that is text.
    """

    summary: str
    body: Any = None
    answer: Any = None
    event: Any = None
    text: str = CONTENT_TYPE
    body_required: bool = True
    body_type: str = _JSON


ENDPOINTS = {
    "/": Endpoint("Show a page with a chat and a view of the engine.", text="text/html"),
    "/health": Endpoint("Say whether the engine works.", answer=health.Health),
    "/ready": Endpoint("Say whether new requests are taken.", answer=health.Health),
    "/version": Endpoint("Say slotline's version.", answer=health.Version),
    "/metrics": Endpoint("Show counts and times in the text format of Prometheus."),
    "/openapi.json": Endpoint("Show this document.", answer=Json),
    "/v1/plan": Endpoint("Show what runs, and why not the others.", answer=Json),
    "/v1/engine": Endpoint("Show requests, blocks and tokens as they are now.", answer=engine_view.EngineView),
    "/v1/models": Endpoint("List the names that requests may give as their model.", answer=models.ModelList),
    "/v1/models/{name}": Endpoint("Show a model.", answer=models.ModelCard),
    "/v1/completions": Endpoint(
        "Continue one prompt or several.",
        completions.CompletionFields,
        completions.Completion,
        completions.Completion,
    ),
    "/v1/chat/completions": Endpoint(
        "Write the assistant's turn of a conversation.", chat.ChatFields, chat.ChatCompletion, chat.ChatChunk
    ),
    "/v1/responses": Endpoint(
        "Write the assistant's turn as items.", response.ResponsesFields, responses.ResponseResource, Json
    ),
    "/v1/messages": Endpoint(
        "Write the assistant's turn in Anthropic's form.", messages_fields.MessagesFields, messages.Message, Json
    ),
    **{
        f"/v1/audio/{path}": Endpoint(
            summary,
            audio_fields.AudioFields,
            audio_fields.AudioText,
            audio_fields.AudioEvent,
            body_type=_FORM,
        )
        for path, summary in (
            ("transcriptions", "Write down what is said in a recording."),
            ("translations", "Write down in English what is said in a recording."),
        )
    },
    "/v1/embeddings": Endpoint("Compute an embedding of each input.", pooling.EmbeddingFields, pooling.Embeddings),
    "/v1/classify": Endpoint("Compute the class of each input.", pooling.ClassifyFields, pooling.Classification),
    "/pooling": Endpoint("Compute what a task gives for each input.", pooling.PoolFields, pooling.PooledList),
    "/classify": Endpoint("Compute the class of each input.", pooling.ClassifyFields, pooling.Classification),
    **{
        path: Endpoint("Compute the score of pairs of texts.", pooling.ScoreFields, pooling.Scores)
        for path in ("/v1/score", "/score")
    },
    **{
        path: Endpoint("Sort documents by their score with a query.", pooling.RerankFields, pooling.Ranking)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    },
    "/tokenize": Endpoint("Return the tokens of a text or of a conversation.", tokens.TokenizeFields, tokens.Tokenized),
    "/detokenize": Endpoint("Return the text of tokens.", tokens.DetokenizeFields, tokens.Detokenized),
    "/v1/load_lora_adapter": Endpoint("Load an adapter as a model.", models.LoadAdapterFields, models.ModelCard),
    "/v1/unload_lora_adapter": Endpoint("Unload an adapter.", models.UnloadAdapterFields, models.DeletedModel),
    "/v1/scale": Endpoint("Let so many replicas take requests.", scale.ScaleFields, scale.Scaled),
    "/scale_elastic_ep": Endpoint("As /v1/scale.", scale.ScaleElasticFields, scale.ScaledElastic),
    "/profile/start": Endpoint(
        "Begin a profile of the engine's steps.",
        profile.StartProfileFields,
        profile.ProfileStarted,
        body_required=False,
    ),
    "/profile/stop": Endpoint(
        "End the profile and write its trace.", profile.StopProfileFields, profile.ProfileWritten, body_required=False
    ),
}


def document(routes: Sequence[Access], *, keys: bool, root: str = "") -> Json:
    """Return the OpenAPI 3.1 document of a server.

    Args:
        routes: the routes of the application. One that `ENDPOINTS` does not have takes and answers any JSON.
        keys: whether the server asks for a key.
        root: path of the server where a proxy shows it, empty for none.
    """
    endpoints = [ENDPOINTS.get(_path(route), Endpoint("")) for route in routes]
    kinds = {kind for one in endpoints for kind in (one.body, one.answer, one.event) if isinstance(kind, type)}
    ordered = [ErrorBody, AnthropicErrorBody, *sorted(kinds, key=lambda kind: (kind.__module__, kind.__name__))]
    found, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    references = dict(zip(ordered, found, strict=True))
    paths: dict[str, Json] = {}
    for route, endpoint in zip(routes, endpoints, strict=True):
        operation = _operation(route, endpoint, references, keys=keys)
        paths.setdefault(_path(route), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "slotline", "version": version_of("slotline")},
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {"schemas": _shown(dict(sorted(components.items()))), "securitySchemes": _SCHEMES},
    }


def _path(route: Access) -> str:
    """Return a path as OpenAPI writes it, without the converters of parameters."""
    return re.sub(r":\w+}", "}", route.path)


def _operation(route: Access, endpoint: Endpoint, references: dict[Any, Json], *, keys: bool) -> Json:
    path = _path(route)
    names = re.findall(r"{(\w+)}", path)
    operation: Json = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", path)]),
        "summary": endpoint.summary,
        "responses": {"200": _answer(endpoint, references)},
    }
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.method == "POST":
        body = references.get(endpoint.body, {})
        operation["requestBody"] = {
            "required": endpoint.body_required,
            "content": {endpoint.body_type: {"schema": body}},
        }
    if (keys and not route.open_to_all) or route.admin:
        operation["security"] = [{name: []} for name in _SCHEMES]
    error = references[AnthropicErrorBody if route.anthropic else ErrorBody]
    for status in sorted(_statuses(route, keys=keys, names=bool(names))):
        operation["responses"][str(status)] = {
            "description": status_text(status),
            "content": {_JSON: {"schema": error}},
        }
    return operation


def _answer(endpoint: Endpoint, references: dict[Any, Json]) -> Json:
    """Return the answer with status 200: JSON, a stream of events, or text."""
    if endpoint.answer is None:
        content: Json = {endpoint.text: {"schema": {"type": "string"}}}
    else:
        content = {_JSON: {"schema": references.get(endpoint.answer, {"type": "object"})}}
    if endpoint.event is not None:
        content["text/event-stream"] = {"schema": _event(references.get(endpoint.event, {"type": "object"}))}
    if endpoint.body_type == _FORM:
        content["text/plain"] = {"schema": {"type": "string"}}
    return {"description": status_text(200), "content": content}


def _event(schema: Json) -> Json:
    """Return the schema of an event of a stream, whose data is JSON of another schema, or says that the stream ends."""
    value = {"contentMediaType": _JSON, "contentSchema": schema}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, value]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _statuses(route: Access, *, keys: bool, names: bool) -> set[int]:
    """Return the statuses of errors."""
    statuses = {500, 503}
    if route.method == "POST":
        statuses |= {400, 404, 408, 413, 429}
    if names:
        statuses |= {404}
    if keys and not route.open_to_all:
        statuses |= {401}
    return statuses | ({401, 403} if route.admin else set())


def _shown(schema: Any) -> Any:
    """Return a schema with those that stand in place of others, and without the indentation of docstrings."""
    if isinstance(schema, list):
        return [_shown(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if INSTEAD in schema:
        return schema[INSTEAD]
    shown = {name: _shown(one) for name, one in schema.items()}
    if isinstance(text := shown.get("description"), str):
        shown["description"] = inspect.cleandoc(text)
    return shown
