"""`slotline chat`: questions and commands from standard input, with an engine of its own or against a server."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, running_server

from slotline.cli import main
from slotline.cli.chat import Conversation
from slotline.core import LLM, SamplingParams
from slotline.registry.errors import RequestError

OPTIONS = ["--temperature", "0", "--max-tokens", "6"]
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(params=["local", "server"])
def where(request: pytest.FixtureRequest, server: RunningServer) -> list[str]:
    return ["--url", server.url] if request.param == "server" else []


def test_a_conversation_goes_on_from_its_answers(
    where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    said = ["def f(", "x = \\", "1", "/undo", "/help", "/nothing", f"/save {saved}", "/save", "/exit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(said)))
    assert main(["chat", *OPTIONS, "--system", "be brief", *where]) == 0
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "def f("}]
    llm = LLM()
    first = llm.chat(messages, PARAMS)[0].outputs[0].text
    messages.append({"role": "assistant", "content": first})
    second = llm.chat([*messages, {"role": "user", "content": "x = \n1"}], PARAMS)[0].outputs[0].text
    assert json.loads(saved.read_text()) == messages
    shown = capsys.readouterr()
    assert shown.out == f"{first}\n{second}\n"
    assert shown.err.count("[6 tokens, ") == 2
    for text in ("/system TEXT", "there is no command /nothing", "/save needs the name of a file"):
        assert text in shown.err


def test_a_question_that_fails_is_forgotten(
    where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'long ' * 5000}\n/save {saved}\n"))
    assert main(["chat", *OPTIONS, *where]) == 0
    assert "max_model_len=2048" in capsys.readouterr().err
    assert json.loads(saved.read_text()) == []


def test_ctrl_c_ends_the_answer_and_not_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    before, went_on = signal.getsignal(signal.SIGINT), threading.Event()

    def endless(_messages: Any) -> Iterator[tuple[str, int]]:
        try:
            for index in range(1000):
                if index == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                yield f"{index} ", 1
        finally:
            went_on.set()

    conversation = Conversation(endless)
    assert conversation.take("count")
    assert went_on.is_set()
    assert conversation.messages[-1] == {"role": "assistant", "content": "0 1 2 3 "}
    assert signal.getsignal(signal.SIGINT) is before


def test_commands_change_the_conversation() -> None:
    def fails(_messages: Any) -> Iterator[tuple[str, int]]:
        raise RequestError("no")
        yield "", 0

    conversation = Conversation(fails)
    conversation.take("/system be brief")
    conversation.messages.append({"role": "user", "content": "x"})
    conversation.take("/reset")
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    conversation.take("/undo")
    conversation.take("question")
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    conversation.take("/system")
    assert conversation.messages == []
    assert not conversation.take("/exit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["--url", "somewhere"], "is no address of a server"),
    ],
)
def test_a_server_that_is_not_there_is_named(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", *options]) == 0
    assert message in capsys.readouterr().err


def test_wrong_options_are_refused_before_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://x", "--set", "dtype=float32"]) == 2
    assert main(["chat", "--temperature", "-1"]) == 2
    assert "temperature=-1.0 is not allowed" in capsys.readouterr().err
