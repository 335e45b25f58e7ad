"""From exceptions to answers: status, form and message. No answer has a traceback."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from typing import TypedDict

from attrs import define
from msgspec import DecodeError, ValidationError

from slotline.llm.turns import ToolsError
from slotline.registry.errors import CapacityError, EngineFailedError, RankError, RequestError, SlotlineError

logger = logging.getLogger("slotline.server")
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


class ErrorDetails(TypedDict):
    """What an error in OpenAI's form says: a text for people, the field at fault, a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """An error in OpenAI's form."""

    error: ErrorDetails


class AnthropicErrorDetails(TypedDict):
    """What an error in Anthropic's form says."""

    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    """An error in Anthropic's form."""

    type: str
    error: AnthropicErrorDetails


@define
class HttpError(Exception):
    """An error with everything that an answer says of it.

    Attributes:
        status: of HTTP.
        message: for people.
        kind: OpenAI's `type`.
        param: the field at fault, None if there is none.
        code: for programs.
        headers: of the answer.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def openai(self) -> ErrorBody:
        """Return the body in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> AnthropicErrorBody:
        """Return the body in Anthropic's form."""
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def unsupported(field: str) -> HttpError:
    """Return the error for a field, or a value of it, that is known and not served."""
    return HttpError(400, f"{field} is not supported by this server; leave it out", param=field, code="unsupported")


def as_http_error(error: BaseException) -> HttpError:
    """Return the answer to an exception. Exceptions that nobody expected are logged, and their text is not shown."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, DecodeError):
        return _undecodable(error)
    if isinstance(error, TimeoutError):
        return HttpError(408, "the request took longer than server.request_timeout", "timeout_error", code="timeout")
    if isinstance(error, ToolsError):
        return HttpError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if "max_model_len" in error.message else "invalid_value"
        return HttpError(400, str(error), param=_param(error.message), code=code)
    if isinstance(error, RankError):  # without the traceback
        return HttpError(503, error.message, "server_error", code="engine_failed")
    if isinstance(error, EngineFailedError):
        return HttpError(503, str(error), "server_error", code="engine_failed")
    if isinstance(error, CapacityError):
        return HttpError(503, str(error), "server_error", code="out_of_memory", headers=(("retry-after", "1"),))
    if isinstance(error, SlotlineError):
        logger.error("a request failed: %s", error)
        return HttpError(500, str(error), "server_error", code="internal_error")
    logger.error("a request failed", exc_info=error)
    return HttpError(500, "the server failed; its log has the cause", "server_error", code="internal_error")


def status_text(status: int) -> str:
    """Return the name of a status."""
    return HTTPStatus(status).phrase


def _undecodable(error: DecodeError) -> HttpError:
    """Return the answer to a body that is no JSON, or not of the endpoint's form."""
    text = str(error)
    if not isinstance(error, ValidationError):
        return HttpError(400, f"the body is no JSON: {text}", code="invalid_json")
    place = _PLACE.search(text)
    where = place[1] if place else ""
    said = _PLACE.sub("", text)
    if unknown := _UNKNOWN.search(said):
        field = f"{where}.{unknown[1]}" if where else unknown[1]
        return HttpError(400, f"unknown field {field!r}; leave it out", param=field, code="unknown_field")
    return HttpError(
        400, f"{where or 'the body'}: {said[:1].lower()}{said[1:]}", param=where or None, code="wrong_type"
    )


def _param(message: str) -> str | None:
    """Return the parameter that a message of `SamplingParams` begins with."""
    match = re.match(r"(\w+)=", message)
    return None if match is None else match[1]
