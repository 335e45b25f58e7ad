"""Bodies and answers of `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr
from slotline.server.fields import Fields
from slotline.server.ranges import INSTEAD, Scale

File = Annotated[bytes, Meta(extra_json_schema={INSTEAD: {"type": "string", "format": "binary"}})]


class AudioFields(Fields, kw_only=True):
    """The form of a request. Names may end with ``[]``, as clients write lists."""

    file: File
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: Scale = 0.0
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    stream: bool = False
    include: list[str] | None = None
    chunking_strategy: str | None = None
    user: str | None = None


class Heard(Struct, kw_only=True):
    """What an answer costs: seconds of sound.

    Attributes:
        seconds: of the recording, rounded up.
    """

    type: str = "duration"
    seconds: int


class AudioSegment(Struct, kw_only=True):
    """A part of a text with its times in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None


class AudioText(Struct, kw_only=True):
    """The text of a recording, and with ``verbose_json`` its parts.

    Attributes:
        language: of the recording, by its English name.
        duration: in seconds.
    """

    task: str | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    text: str
    segments: list[AudioSegment] | UnsetType = UNSET
    usage: Heard


class AudioEvent(Struct, kw_only=True):
    """What is new of a text, or at the end the whole text."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    usage: Heard | UnsetType = UNSET


def as_fields(form: dict[str, list[bytes]]) -> dict[str, Any]:
    """Return a form's fields as values of JSON, the file as it is.

    Raises:
        UnicodeDecodeError: if a known field other than the file is no UTF-8.
    """
    values: dict[str, Any] = {}
    for name, contents in form.items():
        plain = name.removesuffix("[]")
        errors = "strict" if plain in AudioFields.__struct_fields__ else "replace"
        texts = [one if plain == "file" else one.decode(errors=errors) for one in contents]
        many = plain in ("timestamp_granularities", "include")
        values[plain] = [*values.get(plain, []), *texts] if many else texts[-1]
    return values


def recording(given: Any) -> bytes:
    """Return the file of the part ``input_audio`` of a message.

    Raises:
        RequestError: if it has no file in base64.
    """
    data = given.get("data") if isinstance(given, dict) else None
    try:
        return base64.b64decode(data, validate=True)  # type: ignore[arg-type]  # None is refused below
    except (binascii.Error, TypeError, ValueError) as error:
        raise RequestError(
            f"input_audio={safe_repr(given, 60)} has no base64 as data", fix="send {'data': ..., 'format': 'wav'}"
        ) from error
