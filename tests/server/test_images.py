"""Images over HTTP in each form of request, and what is refused alone while others go on."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from file_server import FileServer, file_server
from running_server import RunningServer
from tiny_vision import image, png_file

pytest.importorskip("PIL", reason="image processors need Pillow")


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def files() -> Iterator[FileServer]:
    with file_server({"/0.png": png_file(0)}, {"/inside": "http://169.254.169.254/"}) as server:
        yield server


def chat(url: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    return "chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 6, **more}


def user(parts: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    return "chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 6}


def responses(url: str) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what?"}]
    return "responses", {"input": [{"role": "user", "content": parts}], "max_output_tokens": 6}


def messages(source: dict[str, str]) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    return "messages", {"model": "", "messages": [{"role": "user", "content": parts}], "max_tokens": 6}


def post(running: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/{path}", json={**body, "temperature": 0}, timeout=60)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "choices" in body:
        return str(body["choices"][0]["message"]["content"])
    return str(body["content"][0]["text"] if "content" in body else body["output"][0]["content"][0]["text"])


def test_an_image_is_read_alike_in_every_form_of_request(seeing: RunningServer, shown: Path, files: FileServer) -> None:
    data = encoded(png_file(0))
    urls = [f"data:image/png;base64,{data}", files.url("/0.png"), (shown / "0.png").as_uri()]
    sources = [{"type": "base64", "media_type": "image/png", "data": data}, {"type": "url", "url": urls[1]}]
    asked = [*map(chat, urls), *map(responses, urls), *map(messages, sources)]
    found = {text_of(post(seeing, *one)) for one in asked}
    assert len(found) == 1
    assert text_of(post(seeing, *chat(f"data:image/png;base64,{encoded(png_file(1))}"))) not in found


def test_wrong_images_fail_alone_while_others_go_on(seeing: RunningServer, shown: Path, files: FileServer) -> None:
    good = chat(f"data:image/png;base64,{encoded(png_file(0))}", max_tokens=30)
    path = str(shown / "0.png")
    wrong = {
        "is neither a data URI": [chat(path), chat(None), user([{"type": "image", "image": path}])],
        "neither a data URI nor a URL": [
            user([{"type": "image", "path": path}]),
            user([{"type": "image", "image": [path]}]),
        ],
        "is not under multimodal.folder": [chat("file:///etc/hostname"), chat(f"file://{shown}/../seeing/config.json")],
        "cannot be read": [
            chat(f"data:image/png;base64,{encoded(png_file(0)[:99])}"),
            responses("data:image/png;base64,aaaa"),
        ],
        "not public": [chat("http://169.254.169.254/a.png"), chat(files.url("/inside"))],
        "multimodal.urls allows": [messages({"type": "url", "url": "https://example.com/a.png"})],
        "status 404": [chat(files.url("/none.png"))],
        "max_items": [user([{"type": "image_url", "image_url": {"url": (shown / "0.png").as_uri()}}] * 4)],
        "takes parts of type text, image": [
            user([{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + jpeg()}}])
        ],
        "video has no frames|cannot be read|need av": [
            user([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}])
        ],
        "placeholder": [user([{"type": "text", "text": "<image>"}])],
    }
    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(post, seeing, *good) for _ in range(4)]
        for message, asked in wrong.items():
            for one in asked:
                answer = post(seeing, *one)
                assert answer.status_code == 400, answer.text
                assert any(words in answer.text for words in message.split("|")), answer.text
        assert len({text_of(other.result()) for other in others}) == 1
    seeing.everything_returned()


def jpeg() -> str:
    file = io.BytesIO()
    image(0).save(file, "JPEG")
    return encoded(file.getvalue())
