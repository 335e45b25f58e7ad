"""`/metrics`: counts, times and the state of the engine, under the field's names, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from slotline.core.api.outputs import RequestOutput
from slotline.llm.async_llm import AsyncLLM
from slotline.ranks.replicas.front import loads_of
from slotline.ranks.replicas.reports import Load

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STORED = {
    "asked": "Blocks that the cache lacked and the KV connector was asked for.",
    "loads": "Blocks whose load from the KV connector was started.",
    "lost": "Blocks among them that could not be loaded on some rank.",
    "held": "Blocks that a rank's KV connector held.",
    "failed": "Blocks that a rank's KV connector could not load.",
}
_EVENTS = "Events of the KV connector of a rank: faults, evictions, saves left out and others."


class Metrics:
    """What a server counts. The names are vLLM's where it has the same."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._model = model
        self.registry = CollectorRegistry()
        self.registry.register(_Engine(llm, model))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)
            return made.labels(model)

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of finished requests.").labels(model)
        self._tokens = counter("vllm:generation_tokens", "Tokens generated.").labels(model)
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.").labels(
            model
        )
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens taken from the prefix cache.").labels(model)
        self._preemptions = counter("vllm:num_preemptions", "Requests that lost their blocks.").labels(model)
        self._ended = counter("vllm:request_success", "Outputs that ended, by the reason.", "finished_reason")
        self._first = histogram("vllm:time_to_first_token_seconds", "Seconds to the first token.", _FIRST)
        self._between = histogram(
            "vllm:inter_token_latency_seconds", "Mean seconds between the tokens of a finished request.", _BETWEEN
        )
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Seconds to the end of a request.", _WHOLE)
        self._lengths = histogram("vllm:request_generation_tokens", "Tokens generated for an output.", _TOKENS)
        self._answers = Counter(
            "slotline:http_responses", "Answers by path and status.", ("path", "status"), registry=self.registry
        )

    def count(self, output: RequestOutput, tokens: dict[int, int]) -> None:
        """Count the end of a prompt.

        Args:
            output: its last output.
            tokens: the number of tokens of each of its outputs.
        """
        metrics, total = output.metrics, sum(tokens.values())
        self._prompt_tokens.inc(output.num_prompt_tokens)
        self._queries.inc(len(output.prompt_token_ids))
        self._hits.inc(metrics.num_cached_tokens)
        self._preemptions.inc(metrics.num_preemptions)
        self._tokens.inc(total)
        for count in tokens.values():
            self._lengths.observe(count)
        if metrics.time_to_first_token is not None and metrics.time_in_all is not None:
            self._first.observe(metrics.time_to_first_token)
            self._whole.observe(metrics.time_in_all)
            first = tokens.get(0, 0)
            if first > 1:
                self._between.observe((metrics.time_in_all - metrics.time_to_first_token) / (first - 1))

    def ended(self, reason: str) -> None:
        """Count the end of an output."""
        self._ended.labels(self._model, reason).inc()

    def answered(self, path: str, status: int) -> None:
        """Count an answer of HTTP."""
        self._answers.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry)


class _Engine:
    """State of the engine, read when it is asked for. The steps go on meanwhile."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._llm = llm
        self._model = model

    def describe(self) -> list[Any]:
        """Return nothing, so that no engine is asked when this is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the numbers of now."""
        loads, plan = loads_of(self._llm.front), self._llm.plan
        usable = max(1, sum(load.blocks for load in loads))
        used = 1 - sum(load.free for load in loads) / usable
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch.", sum(load.running for load in loads)),
            ("vllm:num_requests_waiting", "Requests that wait for a place in it.", sum(load.waiting for load in loads)),
            ("vllm:kv_cache_usage_perc", "Share of the cache's blocks in use, from 0 to 1.", used),
            ("slotline:kv_cache_blocks", "Blocks of the cache.", usable),
            (
                "slotline:replicas",
                "Engines behind the server, leaving ones included.",
                len(loads),
            ),
            ("slotline:prompts_unfinished", "Prompts whose outputs are not complete.", self._llm.num_unfinished),
        ):
            gauge = GaugeMetricFamily(name, text, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        if any(load.stored for load in loads):
            yield from self._stored(loads)
        info = InfoMetricFamily("slotline:plan", "The parts that run.")
        info.add_metric((), {"digest": plan.digest, "summary": plan.summary(), "model_name": self._model})
        yield info

    def _stored(self, loads: list[Load]) -> Iterator[Any]:
        """Yield what each replica has asked its KV connector for, and what each of its ranks said."""
        for name, text in _STORED.items():
            by_rank = name in ("held", "failed")
            labels = ("model_name", "replica", *(("rank",) if by_rank else ()))
            family = CounterMetricFamily(f"slotline:kv_connector_blocks_{name}", text, labels=labels)
            for replica, load in enumerate(loads):
                found = None if load.stored is None else getattr(load.stored, name)
                for rank, value in enumerate((found,) if isinstance(found, int) else found or ()):
                    family.add_metric((self._model, str(replica), *((str(rank),) if by_rank else ())), value)
            yield family
        labels = ("model_name", "replica", "rank", "event")
        family = CounterMetricFamily("slotline:kv_connector_events", _EVENTS, labels=labels)
        for replica, load in enumerate(loads):
            for rank, events in enumerate(() if load.stored is None else load.stored.events):
                for event, value in events.items():
                    family.add_metric((self._model, str(replica), str(rank), event), value)
        yield family
