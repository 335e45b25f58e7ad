"""`/v1/scale`: another number of replicas while the server answers, for an administrator."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from slotline.registry.errors import ConfigError, RequestError, SlotlineError
from slotline.server.errors import HttpError
from slotline.server.fields import Fields
from slotline.server.http import json_response
from slotline.server.state import ServerState


class ScaleFields(Fields):
    """The body of `/v1/scale`.

    Attributes:
        data: number of replicas that are to take requests.
    """

    data: int


class Scaled(Struct, kw_only=True):
    """Replicas after the change.

    Attributes:
        data: number of those that take requests.
        started: number of those that were started.
        leaving: number of those that take no more requests, and end with their last.
    """

    data: int
    started: int
    leaving: int


async def scale_replicas(state: ServerState, request: Request) -> Response:
    """Let so many replicas take requests. The answer comes once further ones have been built.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if they cannot be started. The others go on then.
    """
    fields = await state.read(request, ScaleFields)
    async with state.changing:
        try:
            report = await state.llm.scale(fields.data)
        except SlotlineError as error:
            if state.llm.error is not None:
                raise
            wrong = isinstance(error, ConfigError | RequestError)
            kind = "invalid_request_error" if wrong else "server_error"
            raise HttpError(400 if wrong else 503, str(error), kind, code="not_scaled") from error
    return json_response(Scaled(data=report.data, started=report.started, leaving=report.leaving))
