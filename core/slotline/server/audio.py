"""`/v1/audio/transcriptions` and `/v1/audio/translations`: the text of a recording, for speech models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from math import ceil

import msgspec
from attrs import evolve
from starlette.requests import Request
from starlette.responses import Response

from slotline.core.api.outputs import CompletionOutput
from slotline.llm.transcription import Ask, Transcription, TranscriptionOptions
from slotline.llm.transcripts import Segment, Transcript
from slotline.registry.lora_request import AdapterChoice
from slotline.server.audio_fields import (
    AudioEvent,
    AudioFields,
    AudioSegment,
    AudioText,
    Heard,
    as_fields,
)
from slotline.server.errors import HttpError, as_http_error, unsupported
from slotline.server.http import DONE, EventStream, begun, event, json_response
from slotline.server.multipart import read_form
from slotline.server.outputs import refuse_failed
from slotline.server.state import ServerState, within_time
from slotline.server.subtitles import srt, vtt

_TIMED = ("srt", "vtt", "verbose_json")
"""Forms of answers with times."""


async def create_transcription(state: ServerState, request: Request) -> Response:
    """Answer with what is said in a recording.

    Raises:
        HttpError, SlotlineError, msgspec.ValidationError: if the request is wrong.
    """
    return await _answer(state, request, "transcribe")


async def create_translation(state: ServerState, request: Request) -> Response:
    """Answer with what is said in a recording, in English.

    Raises:
        HttpError, SlotlineError, msgspec.ValidationError: if the request is wrong.
    """
    return await _answer(state, request, "translate")


async def _answer(state: ServerState, request: Request, task: str) -> Response:
    fields = await _read(state, request)
    _, adapter = state.model(fields.model)
    state.admit(1)
    form = fields.response_format
    options = TranscriptionOptions(
        task=task,
        language=fields.language or None,
        prompt=fields.prompt,
        timestamps=form in _TIMED,
        temperature=fields.temperature,
        details=form == "verbose_json",
    )
    work = await state.llm.transcription(fields.file, options)
    if fields.stream:
        return EventStream(await state.answer(request, begun(_events(state, work, adapter))))
    found = await state.answer(request, _whole(state, work, adapter))
    if form == "json":
        return json_response(AudioText(text=found.text, usage=_usage(found)))
    if form == "verbose_json":
        return json_response(_details(found, task))
    text = {"text": lambda: found.text + "\n", "srt": lambda: srt(found.segments), "vtt": lambda: vtt(found.segments)}
    return Response(text[form](), media_type="text/plain; charset=utf-8")


async def _read(state: ServerState, request: Request) -> AudioFields:
    """Return the form of a request.

    Raises:
        HttpError, msgspec.ValidationError: if a field is wrong, or asks for what is not served.
    """
    form = await read_form(request, state.max_body)
    try:
        fields = msgspec.convert(as_fields(form), AudioFields, strict=False)
    except UnicodeDecodeError as error:
        raise HttpError(400, f"a field of the form is no text: {error}", code="invalid_form") from error
    for name in ("include", "chunking_strategy"):
        if getattr(fields, name):
            raise unsupported(name)
    if "word" in (fields.timestamp_granularities or ()):
        raise unsupported("timestamp_granularities with 'word'")
    if fields.timestamp_granularities and fields.response_format != "verbose_json":
        raise HttpError(
            400,
            f"timestamp_granularities with response_format={fields.response_format!r}; set it to 'verbose_json'",
            param="timestamp_granularities",
            code="invalid_value",
        )
    if fields.stream and fields.response_format in _TIMED:
        raise HttpError(
            400,
            f"stream with response_format={fields.response_format!r}; set it to 'json' or 'text'",
            param="stream",
            code="invalid_value",
        )
    return fields


async def _whole(state: ServerState, work: Transcription, adapter: AdapterChoice) -> Transcript:
    """Return the transcript once everything is there."""
    steps = work.steps()
    ask = next(steps)
    while True:
        async with aclosing(state.generate(ask.prompt, ask.params, adapter, "final_only")) as outputs:
            (one,) = [one async for output in outputs for one in output.outputs]
        refuse_failed(one)
        try:
            ask = steps.send(one)
        except StopIteration as end:
            found: Transcript = end.value
            return found


async def _events(state: ServerState, work: Transcription, adapter: AdapterChoice) -> AsyncGenerator[bytes]:
    """Yield the text as events: token by token in a recording of one window, else by segments."""
    steps, sent, empty = work.steps(), 0, True
    end = time.monotonic() + state.config.request_timeout
    try:
        ask = next(steps)
        while True:
            one = CompletionOutput()
            async for new in _new(state, ask, adapter, end):
                refuse_failed(new)
                one = evolve(new, token_ids=one.token_ids + new.token_ids)
                if ask.is_text and (text := new.text.lstrip() if empty else new.text):
                    empty = False
                    yield _delta(text)
            try:
                following, found = steps.send(one), None
            except StopIteration as stop:
                found = stop.value
            for segment in () if ask.is_text else work.segments[sent:]:
                yield _delta(segment.text.lstrip() if empty else segment.text)
                empty = False
            if found is not None:
                yield event(AudioEvent(type="transcript.text.done", text=found.text, usage=_usage(found)))
                yield DONE
                return
            ask, sent = following, len(work.segments)
    except Exception as error:
        if empty:
            raise
        yield event(as_http_error(error).openai())


async def _new(state: ServerState, ask: Ask, adapter: AdapterChoice, end: float) -> AsyncGenerator[CompletionOutput]:
    """Yield what is new of an output.

    It raises:
        TimeoutError: after the time `end`, if the server has one.
    """
    seconds = state.config.request_timeout and max(0.001, end - time.monotonic())
    outputs = state.generate(ask.prompt, ask.params, adapter, "delta" if ask.is_text else "final_only")
    async with aclosing(within_time(outputs, seconds)) as stream:
        async for output in stream:
            for one in output.outputs:
                yield one


def _delta(text: str) -> bytes:
    return event(AudioEvent(type="transcript.text.delta", delta=text))


def _details(found: Transcript, task: str) -> AudioText:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return AudioText(
        task=task,
        language=LANGUAGES.get(found.language, found.language or "english"),
        duration=found.duration,
        text=found.text,
        segments=[_segment(one) for one in found.segments],
        usage=_usage(found),
    )


def _segment(one: Segment) -> AudioSegment:
    return AudioSegment(**{name: getattr(one, name) for name in AudioSegment.__struct_fields__})


def _usage(found: Transcript) -> Heard:
    return Heard(seconds=ceil(found.duration))
