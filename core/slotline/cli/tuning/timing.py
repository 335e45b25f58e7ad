"""Timing of one engine: real requests through the real step, as for a user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen

from slotline.cli.tuning.cases import STEPS, WARM_UPS, WINDOWS, Cases
from slotline.core.batch.request import Request
from slotline.core.engine.engine import Engine
from slotline.registry.contracts.sampling_params import SamplingParams

LEAST_SAMPLES = 3
SECONDS = 1.5
"""After so long a case ends with the samples it has, if they are enough."""
LONG_STEP = 0.05
"""Seconds above which a single step is a sample."""


@frozen(kw_only=True)
class Timing:
    """Samples of one case.

    Attributes:
        median: seconds of a step.
        spread: distance of the quartiles, as a share of the median.
        samples: their number.
    """

    median: float
    spread: float
    samples: int

    def to_json(self) -> dict[str, Any]:
        """Return the timing as JSON types."""
        return {"median_s": self.median, "spread": self.spread, "samples": self.samples}


def time_cases(engine: Engine, cases: Cases) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time every case that the engine has room for. Return also the reasons for leaving out the others."""
    bench = _Bench(engine, np.random.default_rng(0))
    timings, skipped = {}, {}
    for batch in cases.batches:
        refusal = _no_room(engine, batch, cases, cases.context)
        if refusal:
            skipped[f"decode {batch}"] = refusal
        else:
            timings[f"decode {batch}"] = bench.decode(batch, cases)
    for name, context in ((f"mixed {cases.mixed}", cases.context), (f"mixed {cases.mixed} long", cases.long)):
        if context and cases.decodes > 0 and not _no_room(engine, cases.decodes + 1, cases, context):
            timings[name] = bench.mixed(cases, context)
    timings[f"prefill {cases.prefill}"] = bench.prefill(cases)
    return timings, skipped


def _no_room(engine: Engine, batch: int, cases: Cases, context: int) -> str:
    tokens = (engine.scheduler.cache.pool.num_blocks - 1) * engine.plan.block_size
    needed = batch * (context + cases.steps)
    return f"the cache holds {tokens} tokens and this takes {needed}" if needed > tokens else ""


@define
class _Bench:
    """Requests of random tokens on one engine."""

    engine: Engine
    random: np.random.Generator
    _ids: Iterator[int] = field(factory=count, init=False)

    def decode(self, batch: int, cases: Cases) -> Timing:
        """Time steps in which each of `batch` requests gets one token."""
        with self._decoding(batch, cases, cases.context):
            steps = STEPS if self._timed(lambda: self._steps(1)) < LONG_STEP else 1

            def sample() -> float:
                return self._timed(lambda: self._steps(steps)) / steps

            return _sampled(sample, WINDOWS)

    def mixed(self, cases: Cases, context: int) -> Timing:
        """Time a short prompt's first token together with decoding requests that have `context` tokens in the cache."""
        with self._decoding(cases.decodes, cases, context):
            return _sampled(lambda: self._first_token(cases.mixed - cases.decodes), WINDOWS)

    def prefill(self, cases: Cases) -> Timing:
        """Time a long prompt's first token."""
        self._first_token(cases.prefill)
        return _sampled(lambda: self._first_token(cases.prefill), WINDOWS)

    @contextmanager
    def _decoding(self, batch: int, cases: Cases, context: int) -> Iterator[None]:
        requests = [self._add(context, cases.steps + cases.context) for _ in range(batch)]
        try:
            while any(request.metrics.time_to_first_token is None for request in requests):
                self.engine.step()
            self._steps(WARM_UPS)
            yield
        finally:
            self._end(requests)

    def _first_token(self, length: int) -> float:
        """Return the seconds from a prompt's arrival to its token.

        Prompts differ, so that none is found in the prefix cache.
        """
        prompt = self._prompt(length)

        def run() -> None:
            request = self._add_prompt(prompt, 1)
            while not request.finished:
                self.engine.step()

        return self._timed(run)

    def _timed(self, work: Callable[[], None]) -> float:
        self._synchronize()
        start = perf_counter()
        work()
        self._synchronize()
        return perf_counter() - start

    def _steps(self, number: int) -> None:
        for _ in range(number):
            self.engine.step()

    def _synchronize(self) -> None:
        if self.engine.plan.device.type == "cuda":
            torch.cuda.synchronize()

    def _add(self, length: int, max_tokens: int) -> Request:
        return self._add_prompt(self._prompt(length), min(max_tokens, self.engine.limits.max_model_len - length))

    def _add_prompt(self, prompt: Sequence[int], max_tokens: int) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        return self.engine.add(f"tune-{next(self._ids)}", prompt, params)

    def _prompt(self, length: int) -> list[int]:
        tokens: list[int] = self.random.integers(0, self.engine.limits.vocab_size, length).tolist()
        return tokens

    def _end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request.request_id)
        while self.engine.has_work:
            self.engine.step()


def _sampled(sample: Callable[[], float], number: int) -> Timing:
    """Return the median of `number` samples, or of fewer if they take long, after one to warm up."""
    sample()
    taken: list[float] = []
    start = perf_counter()
    while len(taken) < number and (len(taken) < LEAST_SAMPLES or perf_counter() - start < SECONDS):
        taken.append(sample())
    low, _, high = quantiles(taken, n=4)
    middle = median(taken)
    return Timing(median=middle, spread=(high - low) / middle, samples=len(taken))
