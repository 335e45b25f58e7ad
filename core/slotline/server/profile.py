"""`/profile/start` and `/profile/stop`: torch's profiler around the engine's steps, for an administrator."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, structs
from starlette.requests import Request
from starlette.responses import Response

from slotline.server.errors import HttpError
from slotline.server.fields import Fields
from slotline.server.http import decode, json_response, read_body
from slotline.server.state import ServerState


class StartProfileFields(Fields):
    """The body of `/profile/start`, which may be left out: options of torch's profiler, each of which makes it slower.

    Attributes:
        record_shapes: record the shapes of each operation's inputs.
        with_stack: record the line of Python that called it.
        profile_memory: record what memory it takes and gives back.
    """

    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False


class StopProfileFields(Fields):
    """The body of `/profile/stop`, which may be left out."""


class ProfileStarted(Struct, kw_only=True):
    """A profile that runs."""

    status: str = "running"
    folder: str


class ProfileWritten(Struct, kw_only=True):
    """A profile that was written.

    Attributes:
        path: of the trace, for Perfetto or chrome://tracing.
        bytes: of the file.
        seconds: that were profiled.
    """

    status: str = "written"
    path: str
    bytes: int
    seconds: float


async def start_profile(state: ServerState, request: Request) -> Response:
    """Begin a profile of the engine's steps.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if one runs, or the server has no folder for it.
    """
    body = await read_body(request, state.max_body)
    fields = await decode(body, StartProfileFields) if body else StartProfileFields()
    if not state.config.profile_folder:
        raise HttpError(
            403,
            "this server has no server.profile_folder, so nobody may profile it",
            "permission_error",
            code="no_profile_folder",
        )
    await state.profiler.start(Path(state.config.profile_folder), **structs.asdict(fields))
    return json_response(ProfileStarted(folder=state.config.profile_folder))


async def stop_profile(state: ServerState, request: Request) -> Response:
    """End the profile and write its trace. The engine waits while torch collects what it recorded.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if none runs, or its trace cannot be written.
    """
    if body := await read_body(request, state.max_body):
        await decode(body, StopProfileFields)
    path, seconds = await state.profiler.stop()
    return json_response(ProfileWritten(path=str(path), bytes=path.stat().st_size, seconds=round(seconds, 3)))
