"""The OpenAPI document: it has each route, and real answers have the form that it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from openapi_answers import assert_fits
from running_server import RunningServer

from slotline.server.openapi import ENDPOINTS, Access
from slotline.server.openapi import document as document_of

PROMPT = {"prompt": "def main(", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "x = "}], "max_tokens": 2, "temperature": 0}
RESPONSE = {"input": "x = ", "max_output_tokens": 2, "include": ["message.output_text.logprobs"]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def fits(document: dict[str, Any], path: str, answer: httpx.Response) -> int:
    """An answer is as the document says. Return its number of events, 1 for one that is no stream."""
    operation = document["paths"][path][answer.request.method.lower()]
    return assert_fits(document, operation, answer.status_code, answer.headers["content-type"], answer.text)


def test_each_route_is_described_once(server: RunningServer, document: dict[str, Any]) -> None:
    app: Any = server.server.config.app
    routes = {(route.path.replace(":path", ""), method) for route in app.routes for method in route.methods}
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert described == {(path, method) for path, method in routes if method != "HEAD"}
    assert set(document["paths"]) == set(ENDPOINTS), "give ENDPOINTS what the path takes and answers"
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)


def test_bodies_are_described_with_their_fields(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for path, methods in document["paths"].items():
        if "post" in methods:
            (content,) = methods["post"]["requestBody"]["content"].values()
            reference = content["schema"]["$ref"]
            assert schemas[reference.rpartition("/")[2]]["additionalProperties"] is False, path
    fields = schemas["CompletionFields"]
    assert fields["required"] == ["prompt"]
    assert {"prompt", "max_tokens", "response_format", "top_k"} < set(fields["properties"])


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/openapi.json", "/v1/plan", "/v1/engine", "/v1/models", "/"]
)
def test_the_state_has_the_form_of_the_document(path: str, document: dict[str, Any], client: httpx.Client) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    fits(document, path, answer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**PROMPT, "logprobs": 2, "echo": True, "n": 2, "temperature": 1}),
        ("/v1/completions", {**PROMPT, **STREAM}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "response_format": SCHEMA}),
        ("/v1/chat/completions", {**CHAT, **STREAM, "logprobs": True}),
        ("/v1/responses", RESPONSE),
        ("/v1/responses", {**RESPONSE, "stream": True}),
        ("/v1/messages", CHAT),
        ("/v1/messages", {**CHAT, "stream": True}),
        ("/tokenize", {"prompt": "def main(", "return_token_strs": True}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
def test_answers_have_the_form_of_the_document(
    path: str, body: Any, document: dict[str, Any], client: httpx.Client
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert (fits(document, path, answer) > 1) == ("stream" in body)


def test_errors_have_the_form_of_the_document(document: dict[str, Any], client: httpx.Client) -> None:
    for path, methods in document["paths"].items():
        if "post" in methods:
            fits(document, path, client.post(path, content=b"{"))
    for path in ("/v1/completions", "/v1/messages"):
        answer = client.post(path, json={**(CHAT if "messages" in path else PROMPT), "model": "none"})
        assert answer.status_code == 404
        fits(document, path, answer)
    fits(document, "/v1/models/{name}", client.get("/v1/models/none"))
    fits(document, "/v1/models/{name}", client.get("/v1/models/slotline-small"))
    fits(document, "/metrics", client.get("/metrics"))


def test_the_answers_of_an_embedding_model_have_the_form_of_the_document(embedding_server: RunningServer) -> None:
    with httpx.Client(base_url=embedding_server.url, timeout=60) as client:
        document = client.get("/openapi.json").json()
        for path, body in (
            ("/v1/embeddings", {"input": ["def main(", "x"]}),
            ("/v1/embeddings", {"input": "x", "encoding_format": "base64"}),
            ("/v1/score", {"text_1": "x", "text_2": ["x", "y"]}),
            ("/pooling", {"input": ["def main(", "x"]}),
            ("/pooling", {"input": "x", "task": "embed"}),
            ("/v1/rerank", {"query": "x", "documents": ["x", "y"]}),
            ("/v1/rerank", {"query": "x", "documents": ["x"], "return_documents": False}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 200
            fits(document, path, answer)
    embedding_server.everything_returned()


def test_keys_are_described_where_they_are_asked_for() -> None:
    user = Access("/v1/score", "POST", open_to_all=False, admin=False, anthropic=False)
    admin = Access("/v1/unload_lora_adapter", "POST", open_to_all=False, admin=True, anthropic=False)
    health = Access("/health", "GET", open_to_all=True, admin=False, anthropic=False)
    for keys, secured in ((True, [user, admin]), (False, [admin])):
        found = document_of([user, admin, health], keys=keys, root="/below")
        assert found["servers"] == [{"url": "/below"}]
        schemes = found["components"]["securitySchemes"]
        assert schemes["bearer"] == {"type": "http", "scheme": "bearer"}
        for route in (user, admin, health):
            operation = found["paths"][route.path][route.method.lower()]
            assert operation.get("security") == ([{name: []} for name in schemes] if route in secured else None)
            assert ("401" in operation["responses"]) == (route in secured)
