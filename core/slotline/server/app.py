"""The application: routes, keys, request ids, the access log, and errors in the form of each endpoint's clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slotline.server.audio import create_transcription, create_translation
from slotline.server.chat import create_chat_completion
from slotline.server.completions import create_completion
from slotline.server.engine_view import show_engine
from slotline.server.errors import HttpError, as_http_error, status_text
from slotline.server.health import health, metrics, plan, ready, version
from slotline.server.http import error_response, json_response
from slotline.server.keys import Keys
from slotline.server.messages import create_message
from slotline.server.models import list_models, load_adapter, show_model, unload_adapter
from slotline.server.openapi import Access, document
from slotline.server.page import show_page
from slotline.server.pooling import (
    create_classification,
    create_embedding,
    create_pooling,
    create_rerank,
    create_score,
)
from slotline.server.profile import start_profile, stop_profile
from slotline.server.request_record import RequestRecord, begin_record, current_record
from slotline.server.responses import create_response
from slotline.server.scale import scale_elastic, scale_replicas
from slotline.server.state import ServerState
from slotline.server.tokens import detokenize, tokenize

Handler = Callable[[ServerState, Request], Awaitable[Response]]
access = logging.getLogger("slotline.access")
_LONGEST_ID = 128


def build_app(state: ServerState, keys: Keys) -> Starlette:
    """Build the application of a server."""
    described: list[Access] = []

    def route(
        path: str,
        handler: Handler,
        method: str = "POST",
        *,
        open_to_all: bool = False,
        admin: bool = False,
        anthropic: bool = False,
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            record = current_record()
            record.route = path
            try:
                if not open_to_all:
                    keys.check(request, admin=admin)
                response = await handler(state, request)
            except Exception as error:
                known = as_http_error(error)
                record.error = known.code
                response = error_response(known, anthropic=anthropic)
            state.metrics.answered(path, response.status_code)
            return response

        described.append(Access(path, method, open_to_all=open_to_all, admin=admin, anthropic=anthropic))
        return Route(path, endpoint, methods=[method])

    async def openapi(state: ServerState, _request: Request) -> Response:
        keyed = bool(keys.users)
        return json_response(document(described, keys=keyed, root=state.config.root_path))

    routes = [
        route("/health", health, "GET", open_to_all=True),
        route("/ready", ready, "GET", open_to_all=True),
        route("/version", version, "GET", open_to_all=True),
        route("/openapi.json", openapi, "GET", open_to_all=True),
        route("/metrics", metrics, "GET"),
        route("/v1/plan", plan, "GET"),
        route("/v1/engine", show_engine, "GET"),
        route("/v1/models", list_models, "GET"),
        route("/v1/models/{name:path}", show_model, "GET"),
        route("/v1/completions", create_completion),
        route("/v1/chat/completions", create_chat_completion),
        route("/v1/responses", create_response),
        route("/v1/messages", create_message, anthropic=True),
        route("/v1/audio/transcriptions", create_transcription),
        route("/v1/audio/translations", create_translation),
        route("/v1/embeddings", create_embedding),
        route("/v1/classify", create_classification),
        route("/classify", create_classification),
        route("/pooling", create_pooling),
        *(route(path, create_score) for path in ("/v1/score", "/score")),
        *(route(path, create_rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        route("/tokenize", tokenize),
        route("/detokenize", detokenize),
        route("/v1/load_lora_adapter", load_adapter, admin=True),
        route("/v1/unload_lora_adapter", unload_adapter, admin=True),
        route("/v1/scale", scale_replicas, admin=True),
        route("/scale_elastic_ep", scale_elastic, admin=True),
        route("/profile/start", start_profile, admin=True),
        route("/profile/stop", stop_profile, admin=True),
    ]
    if state.config.page:
        routes.append(route("/", show_page, "GET", open_to_all=True))
    return Starlette(routes=routes, middleware=_middleware(state), exception_handlers={HTTPException: _no_route})


def _middleware(state: ServerState) -> list[Middleware]:
    middleware = [Middleware(Requests, state=state)]
    if state.config.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=state.config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-api-key", "x-request-id"],
                expose_headers=["x-request-id"],
            )
        )
    return middleware


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer for a path or method that there is not."""
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    message = f"{request.method} {request.url.path}: {status_text(error.status_code).lower()}"
    return error_response(
        HttpError(error.status_code, message, code=code, headers=tuple((error.headers or {}).items()))
    )


class Requests:
    """Middleware that gives each answer the request's id, logs a line of JSON and traces it.

    The prompts' texts are in it only if the configuration asks for them. The outputs' texts are never.
    """

    def __init__(self, app: ASGIApp, *, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")[:_LONGEST_ID]
        request_id = given if given.isascii() and given.decode("ascii", "replace").isprintable() else b""
        request_id = request_id or uuid4().hex.encode()
        config = self._state.config
        logged = config.access_log and config.log_prompts
        record = begin_record(request_id.decode(), config.log_prompts_limit if logged else None)
        start = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            record.seconds = time.monotonic() - start
            if config.access_log:
                _log(scope, record)
            if self._state.tracing is not None:
                self._state.tracing.trace(scope, record)


def _log(scope: Scope, record: RequestRecord) -> None:
    client = scope.get("client")
    line: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "method": scope["method"],
        "path": scope["path"],
        "status": record.status,
        "seconds": round(record.seconds, 6),
        "request_id": record.request_id,
        "client": client[0] if client else None,
    }
    if record.prompts:
        line |= {"prompts": record.prompts, "prompts_cut": record.cut}
    access.info(msgspec.json.encode(line).decode())
