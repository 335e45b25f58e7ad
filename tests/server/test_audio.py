"""`/v1/audio/transcriptions` and `/translations`: OpenAI's client gets what `LLM.transcribe` gives."""

from __future__ import annotations

import base64
import io
import re
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tiny_hearing
from openapi_answers import assert_fits
from running_server import RunningServer, running_server
from tiny_speech import RATE, build_transcriber, recording

from slotline.core import LLM, SamplingParams
from slotline.text.recordings import read_recording

SETTINGS: dict[str, Any] = {"dtype": "float32", "cache.memory": "16MiB"}
PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")


def wav(samples: Any, rate: int = RATE, width: int = 2, channels: int = 1) -> bytes:
    """A file of samples between -1 and 1."""
    whole = np.round(np.asarray(samples) * (2 ** (8 * width - 1) - 1)).astype("<i4")
    if width == 1:
        whole += 128
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, width, rate, 0, "NONE", ""))
        writer.writeframes(np.repeat(whole, channels).view(np.uint8).reshape(-1, 4)[:, :width].tobytes())
    return file.getvalue()


SHORT, LONG = wav(recording(0)), wav(recording(1, 2.2))


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_transcriber(tmp_path_factory.mktemp("speech") / "whisper")


@pytest.fixture(scope="module")
def llm(whisper: Path) -> LLM:
    return LLM(whisper, **SETTINGS)


@pytest.fixture(scope="module")
def running(whisper: Path) -> Iterator[RunningServer]:
    with running_server(model=str(whisper), **SETTINGS, **{"observability.check_integrity": True}) as server:
        yield server


@pytest.fixture
def client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client:
        yield client
    running.everything_returned()


def test_a_text_is_that_of_llm(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.transcribe(SHORT)
    assert expected.text
    asked: dict[str, Any] = {"model": "whisper", "file": ("a.wav", SHORT)}
    answer = client.audio.transcriptions.create(**asked)
    assert answer.text == expected.text
    assert answer.usage is not None
    assert answer.usage.type == "duration"
    assert answer.usage.seconds == 1
    assert client.audio.transcriptions.create(**asked, response_format="text") == expected.text + "\n"
    (expected,) = llm.transcribe(SHORT, task="translate", prompt="def main")
    translated = client.audio.translations.create(**asked, prompt="def main")
    assert translated.text == expected.text


def test_segments_and_subtitles_have_the_times_of_llm(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.transcribe(LONG, language="de", timestamps=True, details=True)
    asked: dict[str, Any] = {"model": "whisper", "file": ("a.wav", LONG), "language": "de"}
    answer = client.audio.transcriptions.create(
        **asked, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (answer.text, answer.language, answer.duration) == (expected.text, "german", pytest.approx(2.2))
    assert answer.segments is not None
    assert len(answer.segments) > 1
    for shown, one in zip(answer.segments, expected.segments, strict=True):
        assert (shown.id, shown.start, shown.end, shown.tokens) == (one.id, one.start, one.end, one.tokens)
        assert shown.text == one.text
        assert shown.avg_logprob == pytest.approx(one.avg_logprob)
        assert shown.no_speech_prob == pytest.approx(one.no_speech_prob)
    asked["file"] = ("a.wav", SHORT)
    (expected,) = llm.transcribe(SHORT, language="de", timestamps=True)
    first = expected.segments[0]
    srt = str(client.audio.transcriptions.create(**asked, response_format="srt"))
    begin, end = (f"00:00:{int(time):02},{round(time % 1 * 1000):03}" for time in (first.start, first.end))
    assert srt.startswith(f"1\n{begin} --> {end}\n{' '.join(first.text.split())}\n\n")
    vtt = str(client.audio.transcriptions.create(**asked, response_format="vtt"))
    assert vtt.startswith(f"WEBVTT\n\n{begin.replace(',', '.')} --> {end.replace(',', '.')}\n")


@pytest.mark.parametrize("sound", [SHORT, LONG], ids=["short", "long"])
def test_a_stream_adds_up_to_the_text(sound: bytes, client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.transcribe(sound, language="en")
    events = list(
        client.audio.transcriptions.create(model="whisper", file=("a.wav", sound), language="en", stream=True)
    )
    *deltas, done = events
    assert len(deltas) > 1
    assert "".join(one.delta for one in deltas if one.type == "transcript.text.delta").strip() == expected.text
    assert done.type == "transcript.text.done"
    assert done.text == expected.text


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_as_the_document_says(path: str, running: RunningServer) -> None:
    document = httpx.get(f"{running.url}/openapi.json", timeout=60).json()
    operation = document["paths"][path]["post"]
    (kind,) = operation["requestBody"]["content"]
    assert kind == "multipart/form-data"
    for form in ("json", "verbose_json", "text", None):
        data = {"stream": "true"} if form is None else {"response_format": form}
        answer = httpx.post(f"{running.url}{path}", data=data, files={"file": SHORT}, timeout=60)
        assert answer.status_code == 200
        assert_fits(document, operation, answer.status_code, answer.headers["content-type"], answer.text)


@pytest.mark.parametrize(
    ("data", "files", "param", "message"),
    [
        ({}, {"file": b"no sound"}, None, "no WAV file|cannot be read"),
        ({}, {"file": wav([])}, "audio", "is no recording"),
        ({}, {"sound": SHORT}, "sound", "unknown field"),
        ({"speed": "2"}, {"file": SHORT}, "speed", "unknown field"),
        ({"model": "other"}, {"file": SHORT}, "model", "does not exist"),
        ({"language": "xx"}, {"file": SHORT}, "language", "language='xx' is not known"),
        ({"temperature": "-1"}, {"file": SHORT}, "temperature", "not allowed"),
        ({"temperature": "warm"}, {"file": SHORT}, "temperature", "expected `float`"),
        ({"response_format": "diarized_json"}, {"file": SHORT}, "response_format", "invalid enum value"),
        ({"response_format": "srt", "stream": "true"}, {"file": SHORT}, "stream", "json"),
        ({"timestamp_granularities[]": "segment"}, {"file": SHORT}, "timestamp_granularities", "verbose_json"),
        (
            {"timestamp_granularities[]": ["segment", "word"], "response_format": "verbose_json"},
            {"file": SHORT},
            "timestamp_granularities with 'word'",
            "not supported",
        ),
        ({"include[]": "logprobs"}, {"file": SHORT}, "include", "not supported"),
        ({"language": b"\xff"}, {"file": SHORT}, None, "is no text"),
        ({"language": "en"}, None, None, "no form"),
    ],
)
def test_a_wrong_request_is_refused_alone(
    data: Any, files: Any, param: str | None, message: str, running: RunningServer
) -> None:
    answer = httpx.post(f"{running.url}{PATHS[0]}", data=data, files=files, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert error["param"] == param
    assert re.search(message, error["message"])
    running.everything_returned()


@pytest.mark.parametrize(
    "body",
    [b"", b"--x\r\n\r\n", b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc', b"--x\r\n\r\na\r\n--x--"],
)
def test_a_cut_form_is_refused(body: bytes, running: RunningServer) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = httpx.post(f"{running.url}{PATHS[0]}", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_form"


def test_a_text_model_says_that_it_does_not_transcribe(server: RunningServer) -> None:
    answer = httpx.post(f"{server.url}{PATHS[0]}", files={"file": SHORT}, timeout=60)
    assert answer.status_code == 400
    assert "does not transcribe; it serves generate" in answer.json()["error"]["message"]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_are_read_in_each_width(width: int) -> None:
    samples, rate = read_recording(wav([0.0, 0.5, -0.5, 0.9], 8000, width, channels=2))
    assert rate == 8000
    assert samples == pytest.approx([0.0, 0.5, -0.5, 0.9], abs=2.0 / 2 ** (8 * width - 1))


def test_a_chat_hears_a_recording(tmp_path: Path) -> None:
    folder = tiny_hearing.build("qwen2_audio", tmp_path / "m")
    parts = [{"type": "text", "text": "def main("}]
    sound = {"data": base64.b64encode(SHORT).decode(), "format": "wav"}
    heard = [{"type": "input_audio", "input_audio": sound}, *parts]
    params = SamplingParams(temperature=0, max_tokens=8)
    with running_server(model=str(folder), **SETTINGS) as server:
        local = LLM(folder, **SETTINGS)
        given: list[Any] = [{"role": "user", "content": [{"type": "audio", "audio": read_recording(SHORT)}, *parts]}]
        (expected,) = local.chat(given, params)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            asked: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 8}
            messages: Any = [{"role": "user", "content": heard}]
            answer = client.chat.completions.create(messages=messages, **asked)
            assert answer.choices[0].message.content == expected.outputs[0].text
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(expected.prompt_token_ids) > 20
            sound["data"] = "??"
            with pytest.raises(openai.BadRequestError, match="no base64"):
                client.chat.completions.create(messages=messages, **asked)
