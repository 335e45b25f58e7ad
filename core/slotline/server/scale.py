"""`/v1/scale`: another number of replicas while the server answers, for an administrator. Also under vLLM's path."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from slotline.ranks.replicas.growth import ScaleReport
from slotline.registry.errors import ConfigError, RequestError, SlotlineError
from slotline.server.errors import HttpError
from slotline.server.fields import Fields
from slotline.server.http import json_response
from slotline.server.state import ServerState

Seconds = Annotated[float, Meta(ge=0)]


class ScaleFields(Fields):
    """The body of `/v1/scale`.

    Attributes:
        data: number of replicas that are to take requests.
        timeout: seconds to wait for requests of replicas that share experts and are to end.
    """

    data: int
    timeout: Seconds | None = None


class ScaleElasticFields(Fields):
    """The body of vLLM's `/scale_elastic_ep`.

    Attributes:
        new_data_parallel_size: as `ScaleFields.data`.
        drain_timeout: as `ScaleFields.timeout`.
    """

    new_data_parallel_size: int
    drain_timeout: Seconds = 120


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


class ScaledElastic(Struct, kw_only=True):
    """vLLM's answer."""

    message: str


async def scale_replicas(state: ServerState, request: Request) -> Response:
    """Let so many replicas take requests. The answer comes once further ones have been built.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if they cannot be started. The others go on then.
    """
    fields = await state.read(request, ScaleFields)
    report = await _scaled(state, fields.data, fields.timeout)
    return json_response(Scaled(data=report.data, started=report.started, leaving=report.leaving))


async def scale_elastic(state: ServerState, request: Request) -> Response:
    """Do the same under vLLM's path.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: as `scale_replicas`.
    """
    fields = await state.read(request, ScaleElasticFields)
    report = await _scaled(state, fields.new_data_parallel_size, fields.drain_timeout)
    return json_response(ScaledElastic(message=f"Scaled to {report.data} data parallel engines"))


async def _scaled(state: ServerState, data: int, timeout: float | None) -> ScaleReport:
    async with state.changing:
        try:
            return await state.llm.scale(data, timeout=timeout)
        except SlotlineError as error:
            if state.llm.error is not None:
                raise
            wrong = isinstance(error, ConfigError | RequestError)
            kind = "invalid_request_error" if wrong else "server_error"
            raise HttpError(400 if wrong else 503, str(error), kind, code="not_scaled") from error
