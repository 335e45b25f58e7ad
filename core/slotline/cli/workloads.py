"""Workloads to time an engine on: seeded token ids, end-of-sequence ignored, so the work is always the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType

from attrs import frozen

from slotline.registry.errors import ConfigError

HIGHEST_TOKEN = 10_000
"""Prompts are drawn from tokens 0 to this one."""


@frozen(kw_only=True)
class Workload:
    """Requests that arrive together, or in several waves.

    Attributes:
        name: as on the command line.
        waves: prompts of each wave. A wave starts when the previous wave has ended. Only the last wave is timed.
        max_tokens: output tokens of each request of a wave.
        temperature: of every request.
        max_model_len: tokens that the longest sequence may have.
    """

    name: str
    waves: tuple[Sequence[Sequence[int]], ...]
    max_tokens: tuple[Sequence[int], ...]
    temperature: float
    max_model_len: int


def nano(scale: float = 1.0) -> Workload:
    """Return the published bench of nano-vllm: 256 requests, 100 to 1024 tokens in, 100 to 1024 out."""
    rng, low, high = Random(0), _scaled(100, scale), _scaled(1024, scale)
    prompts = [_prompt(rng, rng.randint(low, high)) for _ in range(_scaled(256, scale))]
    return _one("nano", prompts, [rng.randint(low, high) for _ in prompts], temperature=0.6, max_model_len=4096)


def latency(scale: float = 1.0) -> Workload:
    """Return one request, 128 in and 512 out, which is bound by reading the weights."""
    return _one("latency", [_prompt(Random(1), _scaled(128, scale))], [_scaled(512, scale)], max_model_len=2048)


def prefill(scale: float = 1.0) -> Workload:
    """Return 16 requests, 4096 in and 1 out, which are bound by arithmetic."""
    rng, count = Random(3), _scaled(16, scale)
    prompts = [_prompt(rng, _scaled(4096, scale)) for _ in range(count)]
    return _one("prefill", prompts, [1] * count, max_model_len=8192)


def decode1(scale: float = 1.0) -> Workload:
    """Return one request, 32 in and 64 out."""
    return _one("decode1", [_prompt(Random(4), _scaled(32, scale))], [_scaled(64, scale)], max_model_len=1024)


def decode16(scale: float = 1.0) -> Workload:
    """Return 16 requests, 32 in and 64 out each."""
    rng, count = Random(5), _scaled(16, scale)
    prompts = [_prompt(rng, _scaled(32, scale)) for _ in range(count)]
    return _one("decode16", prompts, [_scaled(64, scale)] * count, max_model_len=1024)


def prefill512(scale: float = 1.0) -> Workload:
    """Return one request, 512 in and 1 out."""
    return _one("prefill512", [_prompt(Random(6), _scaled(512, scale))], [1], max_model_len=1024)


def prefix(scale: float = 1.0) -> Workload:
    """Return two waves of 16 requests that share 512 tokens, each with 16 of its own, 1 out.

    The second wave finds the shared tokens cached.
    """
    rng, count = Random(7), _scaled(16, scale)
    shared = _prompt(rng, _scaled(512, scale))
    waves = tuple([shared + _prompt(rng, _scaled(16, scale)) for _ in range(count)] for _ in range(2))
    return Workload(name="prefix", waves=waves, max_tokens=([1] * count,) * 2, temperature=0.0, max_model_len=1024)


WORKLOADS: Mapping[str, Callable[[float], Workload]] = MappingProxyType(
    {make.__name__: make for make in (nano, latency, prefill, decode1, decode16, prefill512, prefix)}
)
"""Workloads by name. Each takes the factor on requests and lengths."""


def workload(name: str | None, scale: float = 1.0) -> Workload:
    """Return a workload by name, its requests and lengths multiplied by `scale`, none below 1.

    Raises:
        ConfigError: if the workload is unknown, or the scale is not above 0.
    """
    if name is None or name not in WORKLOADS:
        text = "no workload is named" if name is None else f"there is no workload {name!r}"
        raise ConfigError(text, fix=f"there are {', '.join(WORKLOADS)}")
    if not 0 < scale <= 1:
        raise ConfigError(f"a scale of {scale:g} makes no sense", fix="give a number above 0 and at most 1")
    return WORKLOADS[name](scale)


def _one(
    name: str, prompts: Sequence[Sequence[int]], outputs: Sequence[int], *, max_model_len: int, temperature: float = 0.0
) -> Workload:
    """Return a workload of one wave."""
    return Workload(
        name=name, waves=(prompts,), max_tokens=(outputs,), temperature=temperature, max_model_len=max_model_len
    )


def _prompt(rng: Random, length: int) -> list[int]:
    return [rng.randint(0, HIGHEST_TOKEN) for _ in range(length)]


def _scaled(number: int, scale: float) -> int:
    return max(1, round(number * scale))
