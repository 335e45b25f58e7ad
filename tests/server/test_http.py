"""Answers of the server to wrong requests, keys, limits, and clients that go away. No answer has a traceback."""

from __future__ import annotations

import gc
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from attrs import evolve
from running_server import RunningServer, running_server

from slotline.server.keys import Keys

GOOD = {"prompt": "def main(", "max_tokens": 2, "temperature": 0}
LONG = {"prompt": "def main(", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.everything_returned()


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "says"),
    [
        ("completions", b"", 400, "invalid_json", "the body is empty"),
        ("completions", b"{", 400, "invalid_json", "the body is no JSON"),
        ("completions", b"[1]", 400, "wrong_type", "expected `object`"),
        ("completions", b'{"prompt": "\xff"}', 400, "invalid_json", "the body is no JSON"),
        ("completions", {}, 400, "wrong_type", "missing required field `prompt`"),
        ("completions", {**GOOD, "max_tokens": "8"}, 400, "wrong_type", "max_tokens: expected `int | null`"),
        ("completions", {**GOOD, "max_tokens": 2.0}, 200, None, None),
        ("completions", {**GOOD, "max_tokens": 2.5}, 400, "wrong_type", "max_tokens: expected `int | null`"),
        ("completions", {**GOOD, "max_tokens": 1e300}, 400, "wrong_type", "max_tokens: expected `int | null`"),
        ("completions", b'{"extra_args": {"x":' + b"[" * 5000, 400, "invalid_json", "nested too deeply"),
        ("completions", {**GOOD, "structured_outputs": {"json": {"$ref": "#"}}}, 400, "invalid_value", "no text fits"),
        ("completions", {**GOOD, "max_tokens": 0}, 400, "invalid_value", "max_tokens=0 without echo"),
        ("completions", {**GOOD, "prompt": []}, 400, "invalid_value", "prompt is an empty list"),
        ("completions", {**GOOD, "prompt": ["x", 1]}, 400, "invalid_value", "prompt mixes texts and token ids"),
        ("completions", {**GOOD, "prompt": [10**9]}, 400, "invalid_value", "vocabulary"),
        ("completions", {**GOOD, "n": 0}, 400, "invalid_value", "n=0 is not allowed"),
        ("completions", {**GOOD, "logit_bias": {"a": 1}}, 400, "invalid_value", "logit_bias names 'a'"),
        ("completions", {**GOOD, "stream_options": {}}, 400, "invalid_value", "stream_options without stream"),
        ("completions", {**GOOD, "response_format": {"type": "xml"}}, 400, "wrong_type", "response_format.type"),
        ("completions", {**GOOD, "response_format": {"type": "json_schema"}}, 400, "invalid_value", "no json_schema"),
        ("completions", {**GOOD, "structured_outputs": {"jsn": 1}}, 400, "invalid_value", "structured_outputs"),
        ("completions", {**GOOD, "model": "other"}, 404, "model_not_found", "this server has slotline-small"),
        ("chat/completions", {"messages": []}, 400, "invalid_value", "no messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "invalid_value", "role"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "audio": {}}, 200, None, None),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "store": True},
            400,
            "unsupported",
            "store",
        ),
        (
            "chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
                ]
            },
            400,
            "invalid_value",
            "multimodal.urls allows no host",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]}]},
            400,
            "invalid_value",
            "the arguments of the tool call 'f' are no JSON",
        ),
        ("embeddings", {"input": "x"}, 400, "invalid_value", "task"),
    ],
)
def test_a_wrong_body_is_refused_and_the_next_is_served(
    path: str, body: Any, status: int, code: str | None, says: str | None, client: httpx.Client
) -> None:
    content = body if isinstance(body, bytes) else json.dumps({"max_tokens": 2, **body} if "chat" in path else body)
    answer = client.post(f"/v1/{path}", content=content)
    assert answer.status_code == status
    if says is not None:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == code
        assert says in error["message"]
        assert "Traceback" not in error["message"]
    assert client.post("/v1/completions", json=GOOD).status_code == 200


def test_an_unknown_path_and_a_wrong_method_have_their_status(client: httpx.Client) -> None:
    assert client.get("/v2").json()["error"]["code"] == "not_found"
    answer = client.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert client.get("/v1/models/none").status_code == client.get("/v1/models/").status_code == 404


def test_texts_become_tokens_and_back(client: httpx.Client) -> None:
    found = client.post("/tokenize", json={"prompt": "def main(", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "def main("}
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["count"] > 0
    assert client.post("/tokenize", json={}).status_code == 400
    assert client.post("/detokenize", json={"tokens": [-1]}).json()["error"]["code"] == "invalid_value"


def test_the_state_of_the_server_is_shown(client: httpx.Client) -> None:
    client.post("/v1/completions", json=GOOD)
    assert client.get("/health").json() == client.get("/ready").json() == {"status": "ok"}
    assert client.get("/version").json()["version"]
    plan = client.get("/v1/plan").json()
    metrics = client.get("/metrics").text
    assert plan["digest"] in metrics
    for name in (
        'vllm:num_requests_running{model_name="slotline-small"} 0.0',
        'vllm:request_success_total{finished_reason="length",model_name="slotline-small"}',
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:kv_cache_usage_perc",
        'slotline:http_responses_total{path="/v1/completions",status="200"}',
    ):
        assert name in metrics


def test_a_request_keeps_its_id(client: httpx.Client) -> None:
    assert client.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(client.get("/health").headers["x-request-id"]) == 32


def test_a_client_that_goes_away_aborts_its_request(server: RunningServer, client: httpx.Client) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for stream in (False, True):
        body = json.dumps({**LONG, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + body)
            if stream:
                assert connection.recv(10)
            while not server.state.llm.num_unfinished:
                time.sleep(0.001)
        server.everything_returned()


def test_a_client_that_goes_away_before_its_body_ends_is_no_failure(
    server: RunningServer, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    gone = 'slotline:http_responses_total{path="/v1/completions",status="499"}'
    before = client.get("/metrics").text.partition(gone)[2].splitlines()[:1]
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    for _ in range(500):
        if client.get("/metrics").text.partition(gone)[2].splitlines()[:1] != before:
            break
        time.sleep(0.01)
    else:
        raise AssertionError("the request was not counted with status 499")
    assert "a request failed" not in caplog.text


def test_several_prompts_that_are_refused_leave_no_exception_behind(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert client.post("/v1/completions", json={**GOOD, "prompt": ["x"] * 8, "logprobs": 999}).status_code == 400
    assert client.post("/v1/completions", json=GOOD).status_code == 200
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("asked", [{"prompt": ["x"] * 1025}, {"n": 1025}, {"best_of": 1025, "temperature": 1}])
def test_too_many_prompts_at_a_time_get_status_429(asked: Any, server: RunningServer, client: httpx.Client) -> None:
    body = {**GOOD, **asked}
    answer = client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_adapters_are_loaded_by_nobody_without_a_key(client: httpx.Client) -> None:
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_admin_key")


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    """A server with keys and small limits."""
    values = {
        "lora.name": "torch",
        "server.max_body": "2KB",
        "server.request_timeout": 0.3,
        "server.cors_origins": ["https://page.example"],
        "server.served_model_name": ["one", "two"],
    }
    with running_server(Keys((b"user-key", b"second"), (b"admin-key",)), **values) as running:
        yield running


def asked(server: RunningServer, path: str, key: str | None = "user-key", **more: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    method = "POST" if "json" in more or "content" in more else "GET"
    return httpx.request(method, server.url + path, headers={**headers, **more.pop("headers", {})}, timeout=60, **more)


def test_a_key_is_asked_for(guarded: RunningServer) -> None:
    for key in (None, "wrong", "user-ke"):
        answer = asked(guarded, "/v1/completions", key, json=GOOD)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    for key in ("user-key", "second", "admin-key"):
        assert asked(guarded, "/v1/completions", key, json=GOOD).status_code == 200
    assert asked(guarded, "/v1/models", None, headers={"x-api-key": "second"}).status_code == 200
    assert asked(guarded, "/health", None).status_code == 200
    assert asked(guarded, "/metrics", None).status_code == asked(guarded, "/v1/engine", None).status_code == 401
    assert asked(guarded, "/", None).status_code == 200


def test_an_adapter_comes_and_goes_with_an_admins_key(guarded: RunningServer) -> None:
    folder = guarded.state.llm.engine.runner.model.facts.path / "adapters" / "typed"
    body = {"lora_name": "typed", "lora_path": str(folder)}
    assert asked(guarded, "/v1/load_lora_adapter", "user-key", json=body).status_code == 401
    assert asked(guarded, "/v1/load_lora_adapter", "admin-key", json=body).json()["parent"] == "one"
    assert asked(guarded, "/v1/load_lora_adapter", "admin-key", json=body).json()["error"]["code"] == "name_taken"
    assert asked(guarded, "/v1/completions", json={**GOOD, "model": "typed"}).json()["model"] == "typed"
    wrong = {"lora_name": "none", "lora_path": "/none"}
    assert asked(guarded, "/v1/load_lora_adapter", "admin-key", json=wrong).status_code == 400
    assert asked(guarded, "/v1/unload_lora_adapter", "admin-key", json={"lora_name": "typed"}).json()["deleted"]
    assert asked(guarded, "/v1/completions", json={**GOOD, "model": "typed"}).status_code == 404


def test_adapters_that_are_loaded_at_the_same_time_are_two(guarded: RunningServer) -> None:
    folder = guarded.state.llm.engine.runner.model.facts.path / "adapters"

    def change(name: str, what: str = "load", **more: str) -> httpx.Response:
        return asked(guarded, f"/v1/{what}_lora_adapter", "admin-key", json={"lora_name": name, **more})

    names = ["typed", "docstrings"]
    with ThreadPoolExecutor() as pool:
        loaded = list(pool.map(lambda name: change(name, lora_path=str(folder / name)), names))
    assert [answer.status_code for answer in loaded] == [200, 200], [answer.text for answer in loaded]
    assert len(set(guarded.state.adapters.values())) == 2
    assert [change(name, "unload").status_code for name in names] == [200, 200]


def test_an_admin_profiles_the_steps(guarded: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(what: str, key: str = "admin-key", content: bytes = b"") -> tuple[int, Any]:
        answer = asked(guarded, f"/profile/{what}", key, content=content)
        return answer.status_code, answer.json().get("error", {}).get("code") or answer.json()

    assert profile("start", "user-key") == (401, "invalid_api_key")
    assert profile("start") == (403, "no_profile_folder")
    folder = tmp_path / "profiles"
    monkeypatch.setattr(guarded.state, "config", evolve(guarded.state.config, profile_folder=str(folder)))
    assert profile("stop") == (400, "no_profile")
    assert profile("start", content=b'{"shapes": true}') == (400, "unknown_field")
    for number in (1, 2):
        status, said = profile("start", content=b'{"record_shapes": true}' if number == 2 else b"")
        assert (status, said) == (200, {"status": "running", "folder": str(folder)})
        assert profile("start") == (400, "profile_running")
        assert asked(guarded, "/v1/completions", json=GOOD).status_code == 200
        status, said = profile("stop")
        assert status == 200
        trace = json.loads(gzip.decompress(Path(said["path"]).read_bytes()))
        events = {one["name"]: one.get("args", {}) for one in trace["traceEvents"] if one["ph"] == "X"}
        assert {"slotline.schedule", "slotline.forward", "slotline.sample"} < set(events)
        assert ("Input Dims" in events["aten::embedding"]) == (number == 2)
        assert not guarded.state.llm.engine.profiler.enabled
    assert len(list(folder.iterdir())) == 2
    assert not [one for one in gc.get_objects() if type(one) is torch.autograd.profiler.profile], "a profile is kept"
    folder = tmp_path / "file"
    folder.write_text("")
    monkeypatch.setattr(guarded.state, "config", evolve(guarded.state.config, profile_folder=str(folder)))
    assert profile("start") == (500, "profile_not_written")


def test_a_body_above_the_limit_is_not_read(guarded: RunningServer) -> None:
    for content in (b"x" * 2001, iter([b"x" * 1000] * 3)):
        answer = asked(guarded, "/v1/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_request_that_takes_too_long_is_aborted(guarded: RunningServer) -> None:
    answer = asked(guarded, "/v1/completions", json=LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
    streamed = asked(guarded, "/v1/completions", json={**LONG, "stream": True})
    *_, last = (line for line in streamed.text.splitlines() if line)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    guarded.everything_returned()


def test_pages_of_other_origins_need_leave(guarded: RunningServer) -> None:
    for origin, allowed in (("https://page.example", "https://page.example"), ("https://other.example", None)):
        answer = asked(guarded, "/health", headers={"origin": origin})
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_the_model_has_the_names_it_was_given(guarded: RunningServer) -> None:
    assert [one["id"] for one in asked(guarded, "/v1/models").json()["data"]] == ["one", "two"]
    assert asked(guarded, "/v1/completions", json=GOOD).json()["model"] == "one"
    assert asked(guarded, "/v1/completions", json={**GOOD, "model": "two"}).json()["model"] == "two"


def test_embeddings_scores_and_ranks(embedding_server: RunningServer) -> None:
    with httpx.Client(base_url=embedding_server.url, timeout=60) as client:
        one = client.post("/v1/embeddings", json={"input": "def main("}).json()
        many = client.post("/v1/embeddings", json={"input": ["def main(", "x = 1"], "encoding_format": "base64"}).json()
        import base64
        import struct

        data = base64.b64decode(many["data"][0]["embedding"])
        decoded = struct.unpack(f"<{len(data) // 4}f", data)
        assert decoded == pytest.approx(one["data"][0]["embedding"], abs=1e-2)
        assert one["usage"]["total_tokens"] == 3
        scores = client.post("/v1/score", json={"text_1": "def main(", "text_2": ["def main(", "x = 1"]}).json()["data"]
        assert scores[0]["score"] == pytest.approx(1, abs=1e-3)
        assert scores[1]["score"] < 0.999
        ranked = client.post("/v1/rerank", json={"query": "def main(", "documents": ["x = 1", "def main("], "top_n": 1})
        assert ranked.json()["results"][0]["index"] == 1
        refused = client.post("/v1/completions", json=GOOD)
        assert refused.status_code == 400
        assert "embed" in refused.json()["error"]["message"]
        embedding_server.everything_returned()


def test_an_engine_that_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server() as running, httpx.Client(base_url=running.url, timeout=60) as client:

        def crash(*_: Any) -> Any:
            raise ZeroDivisionError("a secret of the engine")

        monkeypatch.setattr(running.state.llm.engine.runner, "launch", crash, raising=False)
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=LONG))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert {(one.status_code, one.json()["error"]["code"]) for one in answers} == {(503, "engine_failed")}
        assert client.get("/health").status_code == client.get("/ready").status_code == 503
        assert "Traceback" not in client.get("/health").text
        assert client.get("/v1/engine").json()["status"] == "failed"
