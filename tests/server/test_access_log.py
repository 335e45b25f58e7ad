"""The access log of `slotline serve`: a line of JSON a request, with the prompts' texts only where asked for."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import httpx
import pytest
from attrs import evolve
from running_server import RunningServer

SECRET = "the quick brown fox"
COMPLETION = {"prompt": SECRET, "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}


def logged(
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *bodies: Any,
    **settings: Any,
) -> list[Any]:
    """The lines of the log with settings, for one request after the other."""
    config = evolve(server.state.config, access_log=True, **settings)
    monkeypatch.setattr(server.state, "config", config)
    with caplog.at_level(logging.INFO, logger="slotline.access"), httpx.Client(timeout=60) as client:
        for number, body in enumerate(bodies, 1):
            path = "chat/completions" if "messages" in body else "completions"
            client.post(f"{server.url}/v1/{path}", json=body).read()
            for _ in range(500):
                if len(caplog.messages) == number:
                    break
                time.sleep(0.01)
    return [json.loads(message) for message in caplog.messages]


def test_prompts_are_not_logged_unless_asked_for(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = logged(server, monkeypatch, caplog, COMPLETION, CHAT, {**COMPLETION, "model": "other"})
    assert [line["status"] for line in lines] == [200, 200, 404]
    assert set(lines[0]) == {"time", "method", "path", "status", "seconds", "request_id", "client"}
    assert "quick" not in caplog.text


def test_prompts_are_logged_when_asked_for_up_to_a_limit(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = server.state.llm.tokenizer.encode(SECRET)
    several = {**COMPLETION, "prompt": [SECRET, "x" * 100, "y"]}
    wrong = {**COMPLETION, "prompt": [2**40]}
    bodies = (COMPLETION, CHAT, {**COMPLETION, "prompt": ids, "stream": True}, several, wrong)
    plain, chat, tokens, cut, refused = logged(
        server, monkeypatch, caplog, *bodies, log_prompts=True, log_prompts_limit=len(SECRET) + 60
    )
    assert (plain["prompts"], plain["prompts_cut"]) == ([SECRET], False)
    assert SECRET in chat["prompts"][0]
    assert chat["prompts"][0] != SECRET  # as the template renders it
    assert (tokens["prompts"], tokens["prompts_cut"]) == ([SECRET], False)
    assert (cut["prompts"], cut["prompts_cut"]) == ([SECRET, "x" * 60], True)
    assert (refused["status"], refused["prompts"]) == (400, [str([2**40])])
