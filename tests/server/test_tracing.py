"""Spans of the server's requests, in OpenTelemetry's own exporter in memory, and over HTTP at a collector."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from running_server import RunningServer

from slotline.registry.config.schema import ServerConfig
from slotline.registry.errors import ConfigError
from slotline.server.request_record import RequestRecord
from slotline.server.run import traced
from slotline.server.tracing import OPERATIONS, Tracing

COMPLETION = {"prompt": "def main(", "max_tokens": 5, "temperature": 0, "top_p": 0.5, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "x = "}], "max_tokens": 3, "seed": 7, "stop": ["never"]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Spans = Callable[[int], list[ReadableSpan]]


@pytest.fixture
def spans(server: RunningServer) -> Iterator[Spans]:
    """Waits for a number of spans of the server and returns them."""
    exporter = InMemorySpanExporter()
    server.state.tracing = Tracing(SimpleSpanProcessor(exporter))

    def wait(number: int) -> list[ReadableSpan]:
        for _ in range(500):
            if len(found := exporter.get_finished_spans()) >= number:
                break
            time.sleep(0.01)
        assert len(found) == number
        return list(found)

    yield wait
    server.state.tracing = None


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_a_request_is_a_span_with_the_attributes_of_the_conventions(client: httpx.Client, spans: Spans) -> None:
    begin = time.time_ns()
    answer = client.post("/v1/completions", json=COMPLETION, headers={"traceparent": PARENT, "x-request-id": "r-1"})
    usage = answer.json()["usage"]
    (span,) = spans(1)
    assert (span.name, span.kind) == ("text_completion slotline-small", SpanKind.SERVER)
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == tuple(PARENT.split("-")[1:3])
    found = dict(span.attributes or {})
    assert 0 < found.pop("slotline.time_to_first_token") < 60
    assert found.pop("gen_ai.usage.cache_read.input_tokens") == usage["prompt_tokens_details"]["cached_tokens"]
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "slotline",
        "gen_ai.request.model": "slotline-small",
        "gen_ai.response.model": "slotline-small",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "slotline.request_id": "r-1",
    }
    assert span.start_time is not None
    assert span.end_time is not None
    assert begin <= span.start_time < span.end_time <= time.time_ns()
    assert span.status.status_code is StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "slotline"


def test_streams_and_several_outputs_are_counted_whole(client: httpx.Client, spans: Spans) -> None:
    client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    client.post("/v1/completions", json={**COMPLETION, "prompt": ["a", "b"], "n": 2})
    client.post("/v1/messages", json={"messages": CHAT["messages"], "max_tokens": 2})
    chat, several, message = (dict(span.attributes or {}) for span in spans(3))
    assert chat["gen_ai.operation.name"] == message["gen_ai.operation.name"] == "chat"
    assert chat["gen_ai.request.stream"] is True
    assert chat["gen_ai.response.time_to_first_chunk"] == chat["slotline.time_to_first_token"] > 0
    assert (chat["gen_ai.request.seed"], chat["gen_ai.request.stop_sequences"]) == (7, ("never",))
    assert "gen_ai.request.temperature" not in chat  # the model's own
    assert several["gen_ai.usage.output_tokens"] == 20
    assert several["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert several["gen_ai.request.choice.count"] == 2
    assert message["http.route"] == "/v1/messages"


def test_only_requests_to_the_model_are_traced_and_refused_ones_say_why(client: httpx.Client, spans: Spans) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/nowhere"):
        client.get(path)
    client.post("/tokenize", json={"prompt": "x"})
    client.post("/v1/completions", json={**COMPLETION, "model": "other"})
    client.post(
        "/v1/completions", json={**COMPLETION, "n": 0}, headers={"traceparent": PARENT[:-1] + "0"}
    )  # not sampled
    (span,) = spans(1)
    assert span.name == "text_completion"
    assert (span.attributes or {})["error.type"] == "model_not_found"
    assert (span.attributes or {})["http.response.status_code"] == 404
    assert span.status.status_code is StatusCode.UNSET  # a client's fault is no error of a server


def test_a_client_that_goes_away_leaves_an_aborted_span(server: RunningServer, spans: Spans) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**COMPLETION, "max_tokens": 1900, "stream": True}).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(10)
    (span,) = spans(1)
    server.everything_returned()
    assert (span.attributes or {})["error.type"] == "aborted"
    assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (RequestRecord(status=200, error="EngineFailedError"), "EngineFailedError"),
        (RequestRecord(status=200, finish_reasons=["error"]), "request_failed"),
        (RequestRecord(status=503, error="draining"), "draining"),
        (RequestRecord(status=500), "500"),
    ],
)
def test_a_server_that_failed_makes_a_span_of_an_error(record: RequestRecord, error: str) -> None:
    exporter = InMemorySpanExporter()
    record.route = "/v1/embeddings"
    Tracing(SimpleSpanProcessor(exporter)).trace({"headers": [], "method": "POST"}, record)
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == error
    assert span.status.status_code is StatusCode.ERROR


def test_every_endpoint_that_asks_the_model_has_an_operation(server: RunningServer) -> None:
    app: Any = server.server.config.app
    paths = {route.path for route in app.routes if "POST" in route.methods and route.path.startswith("/v1/")}
    assert {path for path in paths if "lora" not in path and path != "/v1/scale"} <= set(OPERATIONS)


def test_a_collector_gets_the_spans_over_http() -> None:
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = Thread(target=collector.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{collector.server_port}"
        record = RequestRecord(route="/v1/completions", status=200, seconds=0.5)
        for config, environ in ((ServerConfig(otlp_endpoint=url), {}), (ServerConfig(), {"OTEL_SDK_DISABLED": "true"})):
            with traced(config, environ) as tracing:
                if tracing is not None:
                    tracing.trace({"headers": [], "method": "POST"}, record)
        collector.shutdown()
        thread.join()
    ((path, message),) = received
    (span,) = message.resource_spans[0].scope_spans[0].spans
    assert (path, span.name) == ("/v1/traces", "text_completion")
    assert span.end_time_unix_nano - span.start_time_unix_nano == 500_000_000


def test_tracing_is_off_until_a_collector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    for environ in ({}, {**named, "OTEL_SDK_DISABLED": "true"}, {**named, "OTEL_TRACES_EXPORTER": "none"}):
        with traced(ServerConfig(), environ) as tracing:
            assert tracing is None
    with traced(ServerConfig(), named) as tracing:
        assert tracing is not None


@pytest.mark.parametrize(
    ("endpoint", "environ", "says"),
    [
        ("collector:4318", {}, "no URL of HTTP"),
        (
            "",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "'grpc' is not served",
        ),
    ],
)
def test_a_collector_that_cannot_be_reached_this_way_is_refused(
    endpoint: str, environ: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says), traced(ServerConfig(otlp_endpoint=endpoint), environ):
        pass


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "slotline.server.tracing")
    with pytest.raises(ConfigError) as caught, traced(ServerConfig(otlp_endpoint="http://127.0.0.1:4318"), {}):
        pass
    assert "pip install 'slotline[otel]'" in str(caught.value)
