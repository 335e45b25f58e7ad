"""Running a workload on an engine and timing its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from slotline.cli.workloads import Workload
from slotline.core.batch.request import Request
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import ConfigError

if TYPE_CHECKING:
    from slotline.llm.llm import LLM


@frozen(kw_only=True)
class Served:
    """One request: prompt tokens, those of them from the prefix cache, output tokens, seconds to the first.

    `tokens` are the output tokens, empty where nothing compares them.
    """

    prompt: int
    cached: int
    output: int
    first: float
    tokens: tuple[int, ...] = ()


@frozen(kw_only=True)
class Wave:
    """Requests that ran together.

    Attributes:
        seconds: from the first request's arrival to the last token.
        served: the requests.
        steps: (seconds since the start at a step's end, seconds it took, tokens it gave), in order.
        prompt_steps: number of steps until every request had its first token.
    """

    seconds: float
    served: tuple[Served, ...]
    steps: tuple[tuple[float, float, int], ...]
    prompt_steps: int

    @property
    def prompt_seconds(self) -> float:
        """Until every request had its first token."""
        return self.steps[self.prompt_steps - 1][0]

    @property
    def later_steps(self) -> tuple[tuple[float, float, int], ...]:
        """Steps after that, so pure decoding."""
        return self.steps[self.prompt_steps :]


@frozen(kw_only=True)
class Run:
    """A whole workload, once."""

    waves: tuple[Wave, ...]

    @property
    def seconds(self) -> float:
        """Of the last wave, the one that counts."""
        return self.waves[-1].seconds


def workload_length(loaded: LoadedConfig, work: Workload, folder: Path) -> dict[str, Any]:
    """Return the workload's model length, unless the configuration names one or the model is shorter."""
    if loaded.origins["scheduler.max_model_len"].kind != "default" or not (folder / "config.json").is_file():
        return {}
    from slotline.planner.auto_config import auto_config

    config = auto_config(folder).get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or work.max_model_len
    return {"scheduler.max_model_len": min(work.max_model_len, longest)}


def timed_runs(llm: LLM, work: Workload, count: int) -> list[Run]:
    """Run once to warm up, then `count` times. The prefix cache is empty at the start of each run.

    Raises:
        ConfigError: if the model is too short for the workload.
    """
    _check_length(llm, work)
    return [_run(llm, work) for _ in range(count + 1)][1:]


def median_run(runs: Sequence[Run]) -> Run:
    """Return the run of median length. Of an even number it is the faster of the two in the middle."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def _check_length(llm: LLM, work: Workload) -> None:
    limit = llm.engine.limits.max_model_len
    longest = max(
        len(prompt) + out
        for prompts, outs in zip(work.waves, work.max_tokens, strict=True)
        for prompt, out in zip(prompts, outs, strict=True)
    )
    if longest > limit:
        fix = f"scale the workload, --scale {0.95 * limit / longest:.2g}, or take a longer model or max_model_len"
        raise ConfigError(f"{work.name} has sequences of {longest} tokens, and max_model_len is {limit}", fix=fix)


def _run(llm: LLM, work: Workload) -> Run:
    llm.engine.forget_prefixes()
    waves = zip(work.waves, work.max_tokens, strict=True)
    return Run(waves=tuple(_wave(llm, prompts, outs, work.temperature) for prompts, outs in waves))


def _wave(llm: LLM, prompts: Sequence[Sequence[int]], outs: Sequence[int], temperature: float) -> Wave:
    engine, vocab_size = llm.engine, llm.engine.limits.vocab_size
    prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
    _synchronize()
    start = perf_counter()
    requests = [
        engine.add(f"bench-{index}", prompt, _params(out, temperature))
        for index, (prompt, out) in enumerate(zip(prompts, outs, strict=True))
    ]
    steps: list[tuple[float, float, int]] = []
    waiting, prompt_steps = requests, 0
    while engine.has_work:
        before = perf_counter()
        tokens = len(engine.step().token_ids)
        after = perf_counter()
        steps.append((after - start, after - before, tokens))
        if waiting:
            waiting, prompt_steps = [r for r in waiting if r.metrics.time_to_first_token is None], len(steps)
    _synchronize()
    seconds, served = perf_counter() - start, tuple(map(_served, requests))
    return Wave(seconds=seconds, served=served, steps=tuple(steps), prompt_steps=prompt_steps)


def _params(max_tokens: int, temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True, detokenize=False)


def _served(request: Request) -> Served:
    metrics = request.metrics
    return Served(
        prompt=len(request.prompt_token_ids),
        cached=metrics.num_cached_tokens,
        output=len(request.output_token_ids),
        first=metrics.time_to_first_token or 0.0,
        tokens=tuple(map(int, request.output_token_ids)),
    )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
