"""Traces for OpenTelemetry: a span for each request to the model, with the attributes of the GenAI conventions."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.metadata import version as version_of

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from slotline.registry.errors import ConfigError
from slotline.server.request_record import RequestRecord

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/classify": "classify",
    "/classify": "classify",
    "/pooling": "pooling",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "translation",
}
"""`gen_ai.operation.name` by path. Other paths have no span."""
_PARAMETERS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "stop": "gen_ai.request.stop_sequences",
    "n": "gen_ai.request.choice.count",
}
"""Names of the parameters of `SamplingParams`, which are set if the request gives them."""


class Tracing:
    """Spans of requests.

    A span is made when its answer has ended, with the times of the request. A request whose W3C `traceparent` says
    that its trace is not sampled makes none, unless OTEL_TRACES_SAMPLER asks for all.

    Args:
        processor: takes the spans that have ended.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "slotline"}
        resource = Resource.create({**named, "service.version": version_of("slotline")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("slotline.server", version_of("slotline"))

    def trace(self, scope: Scope, record: RequestRecord) -> None:
        """Make the span of a request whose answer has ended, if it asked the model for something."""
        operation = OPERATIONS.get(record.route or "")
        if operation is None:
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        error, end = _error(record), time.time_ns()
        span = self._tracer.start_span(
            f"{operation} {record.model}" if record.model else operation,
            propagate.extract(headers),
            SpanKind.SERVER,
            _attributes(operation, record, scope["method"], error),
            start_time=end - round(record.seconds * 1e9),
        )
        if error is not None and not 400 <= record.status < 500:  # a client's fault is no error of a server's span
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send the spans that are left, and end."""
        self._provider.shutdown()


def open_tracing(endpoint: str, environ: Mapping[str, str] = os.environ) -> Tracing:
    """Return tracing that sends spans with OTLP over HTTP.

    Args:
        endpoint: URL of a collector, without the path of traces. Empty for that of the OTEL_ variables.

    Raises:
        ConfigError: if the endpoint is no URL, or the variables ask for another protocol.
    """
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"server.otlp_endpoint = {endpoint!r} is no URL of HTTP", fix="give one such as 'http://127.0.0.1:4318'"
        )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (protocol := environ.get(name, "http/protobuf")) != "http/protobuf":
            raise ConfigError(f"{name} = {protocol!r} is not served", fix="set it to 'http/protobuf'")
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
    return Tracing(BatchSpanProcessor(exporter))


def _error(record: RequestRecord) -> str | None:
    """Return the kind of a request's error, None if it was answered whole."""
    if record.error is not None:
        return record.error
    if record.status >= 400:
        return str(record.status)
    if "error" in record.finish_reasons:
        return "request_failed"
    return "aborted" if record.unfinished else None  # the client has gone, or the time was over


def _attributes(operation: str, record: RequestRecord, method: str, error: str | None) -> dict[str, AttributeValue]:
    """Return the attributes of a span. Those that are not known are left out."""
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "slotline",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "http.request.method": method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "slotline.request_id": record.request_id,
        "error.type": error,
    }
    if record.prompt_tokens:
        found["gen_ai.usage.input_tokens"] = record.prompt_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
    if (params := record.params) is not None:
        found |= {name: getattr(params, field) for field, name in _PARAMETERS.items() if field in params.given}
        found["gen_ai.request.stream"] = record.stream
        found["gen_ai.usage.output_tokens"] = record.output_tokens
        found["gen_ai.response.finish_reasons"] = tuple(record.finish_reasons)
        found["slotline.time_to_first_token"] = record.first_token
        if record.stream:
            found["gen_ai.response.time_to_first_chunk"] = record.first_token
    return {name: value for name, value in found.items() if value is not None}
