"""State of the server: `/health`, `/ready`, `/version`, `/metrics` and `/v1/plan`."""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from slotline.server.errors import HttpError
from slotline.server.http import json_response
from slotline.server.metrics import CONTENT_TYPE
from slotline.server.state import ServerState


class Health(TypedDict):
    """State of the server."""

    status: str


class Version(TypedDict):
    """Version of slotline."""

    version: str


async def health(state: ServerState, _request: Request) -> Response:
    """Answer with status 200 while the engine works.

    Raises:
        SlotlineError: what ended it, for status 503.
    """
    if (error := state.llm.error) is not None:
        raise error
    return json_response(Health(status="ok"))


async def ready(state: ServerState, request: Request) -> Response:
    """Answer with status 200 while new requests are taken. The server listens only once the engine is warm.

    Raises:
        HttpError: with status 503 while the server ends.
        SlotlineError: what ended the engine.
    """
    if state.draining:
        raise HttpError(503, "the server ends", "server_error", code="draining")
    return await health(state, request)


async def version(_state: ServerState, _request: Request) -> Response:
    """Answer with slotline's version."""
    return json_response(Version(version=version_of("slotline")))


async def metrics(state: ServerState, _request: Request) -> Response:
    """Answer with the metrics."""
    return Response(state.metrics.text(), headers={"content-type": CONTENT_TYPE})


async def plan(state: ServerState, _request: Request) -> Response:
    """Answer with the plan: what runs, and why not the others."""
    return json_response(state.llm.plan.to_json())
