"""Cases that are timed on each engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict, frozen

from slotline.registry.errors import ConfigError

WARM_UPS, WINDOWS, STEPS = 4, 7, 8
"""Decode steps before the first sample, samples of a case, and decode steps of each sample's mean."""
BATCHES = (1, 8, 64)
"""Requests of the decode cases, in addition to the most that run at a time."""
CONTEXT = {"cuda": 1024, "cpu": 64}
PREFILL = {"cuda": 2048, "cpu": 256}
MIXED_DECODES, MIXED_TOKENS = 8, 64
LONG = {"cuda": 8192}
"""Tokens of context in the second mixed case, if the model takes twice the usual number.

A backend that serves single tokens and a prompt in one launch may be best with few keys, and not with many.
"""


@frozen(kw_only=True)
class Cases:
    """Timed cases, by sizes.

    Attributes:
        batches: requests of each decode case.
        context: tokens that each request has in the cache when its decode steps begin.
        prefill: tokens of the one prompt of the prefill case.
        mixed: tokens of the mixed case's step: up to 8 requests that decode, and a prompt of the rest.
        long: tokens that each of the decoding requests has in the cache in a second mixed case, 0 for no second case.
    """

    batches: tuple[int, ...]
    context: int
    prefill: int
    mixed: int
    long: int = 0

    @property
    def steps(self) -> int:
        """Decode steps that a request may have to make."""
        return WARM_UPS + (WINDOWS + 1) * STEPS

    def describe(self) -> str:
        """Return the cases as a line for a reader."""
        batches = ", ".join(map(str, self.batches))
        short = f"; one of {self.mixed - self.decodes} tokens beside {self.decodes} that decode"
        short += f", and beside as many with {self.long} tokens of context" if self.long else ""
        return (
            f"decode steps of {batches} requests with {self.context} tokens of context each; one prompt of "
            f"{self.prefill} tokens{short if self.decodes > 0 else ''}"
        )

    @property
    def decodes(self) -> int:
        """Requests that decode in the mixed case."""
        return min(MIXED_DECODES, self.batches[-1] - 1, self.mixed - 1)

    def to_json(self) -> dict[str, Any]:
        """Return the cases as JSON types."""
        return asdict(self)


def cases_for(
    device_type: str,
    *,
    max_requests: int,
    max_model_len: int,
    max_batched_tokens: int,
    context: int | None = None,
    batches: Sequence[int] | None = None,
) -> Cases:
    """Return the cases that an engine of these bounds can run.

    Args:
        context: tokens of context. None means the device's usual number, cut to the model's length.
        batches: decode batches. None means 1, 8, 64 and `max_requests`.

    Raises:
        ConfigError: if a size was asked for that does not fit.
    """
    rows = sorted({min(size, max_requests) for size in (*(batches or BATCHES), max_requests)})
    if rows[0] < 1:
        raise ConfigError(f"a decode batch of {rows[0]} requests is none", fix="give numbers from 1 on")
    plain = Cases(batches=tuple(rows), context=1, prefill=1, mixed=1)
    longest = max_model_len - plain.steps
    if (context or 1) > longest or longest < 1:
        raise ConfigError(
            f"{context or 1} tokens of context and {plain.steps} decode steps do not fit into "
            f"max_model_len={max_model_len}",
            fix="give a smaller --context or raise scheduler.max_model_len",
        )
    usual = CONTEXT.get(device_type, CONTEXT["cpu"])
    prefill = min(PREFILL.get(device_type, PREFILL["cpu"]), max_batched_tokens, max_model_len - 1)
    context, long = context or min(usual, longest), min(LONG.get(device_type, 0), longest)
    return Cases(
        batches=tuple(rows),
        context=context,
        prefill=prefill,
        mixed=min(MIXED_TOKENS, max_batched_tokens),
        long=long if long >= 2 * context else 0,
    )
