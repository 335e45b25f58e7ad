"""Figures of a run, each with the hardware's limit."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from attrs import frozen

from slotline.cli.bench_limits import Machine, ModelCost
from slotline.cli.bench_run import Run, Served, Wave


@frozen(kw_only=True)
class Figure:
    """One figure.

    Attributes:
        key, label: for machines and for people.
        value: measured: a rate in tokens/s, or seconds.
        limit: the limit of the hardware in the same unit, None if unknown.
        is_time: whether less is better.
    """

    key: str
    label: str
    value: float
    limit: float | None
    is_time: bool = False

    @property
    def share(self) -> float | None:
        """Of the limit that is reached, 1 being all of it."""
        if self.limit is None or not self.value:
            return None
        return self.limit / self.value if self.is_time else self.value / self.limit

    def to_json(self) -> dict[str, Any]:
        """Return the figure as JSON types."""
        return {"value": self.value, "limit": self.limit, "share": self.share}

    def cells(self) -> tuple[str, str, str, str]:
        """Return the figure as a row of the table."""
        share = "-" if self.share is None else f"{self.share:.0%}"
        return (self.label, self._text(self.value), "-" if self.limit is None else self._text(self.limit), share)

    def _text(self, number: float) -> str:
        if not self.is_time:
            return f"{number:,.1f}"
        return f"{number:,.3f} s" if number >= 1 else f"{number * 1e3:,.2f} ms"


def figures(run: Run, cost: ModelCost | None, machine: Machine) -> list[Figure]:
    """Return all figures of a run. There are no limits without a cost."""
    rows = list(_wave_figures(run.waves[-1], cost, machine))
    if len(run.waves) > 1:
        first = _time_to_first(run.waves[0], cost, machine)
        rows.append(
            Figure(key="first_wave_ttft_median", label="the first wave's", value=first[0], limit=first[1], is_time=True)
        )
    return rows


def _wave_figures(wave: Wave, cost: ModelCost | None, machine: Machine) -> Iterator[Figure]:
    served, out = wave.served, sum(r.output for r in wave.served)
    new = sum(r.prompt - r.cached for r in served)
    prompt_s = cost.prompt_seconds(served, machine) if cost else None
    decode_s = cost.decode_seconds(served, machine) if cost else None
    total_s = None if prompt_s is None or decode_s is None else prompt_s + decode_s
    yield Figure(key="seconds", label="time in all", value=wave.seconds, limit=total_s, is_time=True)
    yield Figure(
        key="output_tokens_per_s", label="output tokens/s", value=out / wave.seconds, limit=total_s and out / total_s
    )
    yield Figure(
        key="prefill_tokens_per_s",
        label="prompt tokens/s",
        value=new / wave.prompt_seconds,
        limit=prompt_s and new / prompt_s,
    )
    first, first_limit = _time_to_first(wave, cost, machine)
    yield Figure(key="ttft_median", label="time to first token, median", value=first, limit=first_limit, is_time=True)
    if wave.later_steps:
        yield from _decoding(wave, decode_s, cost)


def _decoding(wave: Wave, decode_s: float | None, cost: ModelCost | None) -> Iterator[Figure]:
    """Yield the figures of steps after the last prompt: their tokens/s and their median length."""
    later = wave.later_steps
    rate = sum(tokens for _, _, tokens in later) / (wave.seconds - wave.prompt_seconds)
    everything = sum(r.output - 1 for r in wave.served)
    steps = cost.decode_steps(wave.served) if cost else 0
    yield Figure(
        key="decode_tokens_per_s", label="decoded tokens/s", value=rate, limit=decode_s and everything / decode_s
    )
    step = median(seconds for _, seconds, _ in later)
    yield Figure(
        key="step_median", label="decoding step, median", value=step, limit=decode_s and decode_s / steps, is_time=True
    )


def _time_to_first(wave: Wave, cost: ModelCost | None, machine: Machine) -> tuple[float, float | None]:
    """Return the median over the requests, and the least: the cheaper half of the prompts, one after the other."""
    value = median(r.first for r in wave.served)
    if cost is None:
        return value, None
    cheapest = sorted(wave.served, key=_new_tokens)
    return value, cost.prompt_seconds(cheapest[: (len(cheapest) + 1) // 2], machine)


def _new_tokens(request: Served) -> int:
    return request.prompt - request.cached
