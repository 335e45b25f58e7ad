"""Requests that schemathesis makes from the OpenAPI document. Each is answered as the document says, or refused."""

from __future__ import annotations

from copy import deepcopy
from math import inf
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from running_server import RunningServer
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from slotline.server.openapi import ENDPOINTS

POSTS = sorted(path for path, endpoint in ENDPOINTS.items() if endpoint.body is not None)
SERVED = ["/detokenize", "/tokenize", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
"""Those that the shared server, which generates and has no admin, does not refuse in any case."""
EMBEDDING = ["/pooling", "/v1/embeddings", "/v1/rerank", "/v1/score"]
MOST = 3
"""Tokens and outputs of a request."""
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""Fields that limit an answer, which else takes what the model's length leaves."""

WORDS = {"type": "string", "pattern": "^[a-z(= ]{1,8}$"}
FEW = {"type": "integer", "minimum": 1, "maximum": MOST}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "flag", "schema": {"type": "boolean"}}}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": WORDS},
    "required": ["role", "content"],
    "additionalProperties": False,
}
RIGHT: dict[str, Any] = {
    "allowed_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 4095}, "minItems": 1},
    "bad_words": {"type": "array", "items": WORDS},
    "best_of": {"enum": [None, MOST]},
    "documents": {"enum": [None, [{"title": "x", "text": "y"}]]},
    "include": {"enum": [None, ["message.output_text.logprobs"]]},
    "input": {"anyOf": [WORDS, {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 3}]},
    "instructions": {"anyOf": [WORDS, {"type": "null"}]},
    "logit_bias": {"enum": [None, {"3": 1.5, "17": -100}]},
    "max_completion_tokens": FEW,
    "max_output_tokens": FEW,
    "max_tokens": FEW,
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 3},
    "modalities": {"enum": [None, ["text"]]},
    "model": {"enum": ["slotline-small", None]},
    "n": FEW,
    "prompt": {"anyOf": [WORDS, {"type": "array", "items": WORDS, "minItems": 1, "maxItems": 3}]},
    "response_format": {"enum": [None, {"type": "text"}, SCHEMA]},
    "service_tier": {"enum": [None, "auto"]},
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 4095}},
    "structured_outputs": {"enum": [None, {"choice": ["a", "b"]}, {"regex": "[ab]{1,3}"}]},
    "system": {"anyOf": [WORDS, {"type": "null"}]},
    "top_logprobs": {"enum": [None, 0, 2]},
    "truncation": {"enum": [None, "disabled"]},
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 4095}},
}
"""Values that this server serves, of fields whose type allows many others."""
REFUSED = {
    *("audio", "chat_template_kwargs", "container", "context_management", "extra_args", "function_call", "functions"),
    *(
        "include_obfuscation",
        "mcp_servers",
        "negative_prompt",
        "prediction",
        "priority",
        "prompt_embeds",
        "store",
        "suffix",
    ),
    *("thinking", "tool_choice", "tools", "verbosity", "web_search_options"),
}
"""Fields that this server refuses with most values."""
REFUSED_IN_RESPONSES = {
    *("background", "best_of", "conversation", "max_tool_calls", "n", "previous_response_id", "prompt"),
    *("prompt_cache_retention", "prompt_logprobs", "response_format", "text", "reasoning"),
}


@pytest.fixture(scope="module")
def document(server: RunningServer) -> dict[str, Any]:
    return httpx.get(f"{server.url}/openapi.json", timeout=60).json()


@pytest.fixture(scope="module")
def narrow(document: dict[str, Any]) -> dict[str, Any]:
    return narrowed(deepcopy(document))


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """A document whose requests are mostly served."""
    for name, schema in document["components"]["schemas"].items():
        properties = schema["properties"]
        if name.endswith("Fields") or name == "StreamOptions":
            refused = REFUSED | (REFUSED_IN_RESPONSES if name == "ResponsesFields" else set())
            schema["properties"] = {
                field: RIGHT.get(field, shape) for field, shape in properties.items() if field not in refused
            }
    document["components"]["schemas"]["TokenizeFields"]["oneOf"] = [
        {"required": ["prompt"], "properties": {"messages": {"type": "null"}}},
        {"required": ["messages"], "properties": {"prompt": {"type": "null"}}},
    ]
    return document


def bound(body: dict[str, Any], limit: str) -> None:
    """Let a request ask for few tokens and outputs."""
    if body.get(limit) is None:
        body[limit] = MOST
    for name, most in ((limit, inf), ("max_completion_tokens", inf), ("n", 16384), ("best_of", 16384)):
        if isinstance(value := body.get(name), int | float) and MOST < value <= most:
            body[name] = MOST


def ask(server: RunningServer, document: dict[str, Any], path: str, mode: GenerationMode, examples: int) -> list[int]:
    """Send requests that fit the document, or do not. Return the statuses of the answers."""
    schema = schemathesis.openapi.from_dict(document)
    operation, statuses = schema[path]["POST"], list[int]()

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck)
    @given(operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        if mode is GenerationMode.POSITIVE and path in LIMITS:
            bound(case.body, LIMITS[path])
        answer = case.call(base_url=server.url)
        assert "Traceback (most recent" not in answer.text  # the model may well write the first word
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])
        statuses.append(answer.status_code)

    run()
    embeds = server.state.llm.loaded.config.task == "embed"
    following, body = ("embeddings", {"input": "x"}) if embeds else ("completions", {"prompt": "x", "max_tokens": 1})
    assert httpx.post(f"{server.url}/v1/{following}", json=body, timeout=60).status_code == 200
    server.everything_returned()
    return statuses


@pytest.mark.spread(2)
@pytest.mark.parametrize("examples", [8, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", SERVED)
def test_right_requests_are_answered(path: str, examples: int, narrow: dict[str, Any], server: RunningServer) -> None:
    statuses = ask(server, narrow, path, GenerationMode.POSITIVE, examples)
    assert statuses.count(200) > len(statuses) // 4


@pytest.mark.slow
@pytest.mark.parametrize("path", EMBEDDING)
def test_requests_to_an_embedding_model_are_answered_or_refused(
    path: str, document: dict[str, Any], embedding_server: RunningServer
) -> None:
    statuses = ask(embedding_server, document, path, GenerationMode.POSITIVE, 40)
    assert 200 in statuses


@pytest.mark.parametrize("examples", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", POSTS)
def test_wrong_requests_are_refused(path: str, examples: int, document: dict[str, Any], server: RunningServer) -> None:
    statuses = ask(server, document, path, GenerationMode.NEGATIVE, examples)
    assert all(400 <= status < 500 for status in statuses)


@pytest.mark.slow
@pytest.mark.parametrize("path", SERVED)
def test_odd_requests_are_answered_or_refused(path: str, document: dict[str, Any], server: RunningServer) -> None:
    statuses = ask(server, document, path, GenerationMode.POSITIVE, 25)
    assert all(status < 500 for status in statuses)
