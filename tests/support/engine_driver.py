"""Driving an engine step by step, and seeing what each step ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

from slotline.core import LLM, SamplingParams
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.plugins.multimodal.item_scheduler import StepItems

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab_size: int = 384) -> list[list[int]]:
    """Prompts of random ordinary tokens."""
    rng = Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


@contextmanager
def recorded(llm: LLM) -> Iterator[list[SchedulerOutput]]:
    """The schedule of every step that runs inside."""
    scheduler, seen = llm.engine.scheduler, list[SchedulerOutput]()
    original: Callable[[], SchedulerOutput] = scheduler.schedule

    def schedule() -> SchedulerOutput:
        seen.append(original())
        return seen[-1]

    scheduler.schedule = schedule  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del scheduler.schedule


@contextmanager
def recorded_items(llm: LLM) -> Iterator[list[StepItems]]:
    """The items of every step that runs inside."""
    scheduler, seen = llm.engine.extension("multimodal").items, list[StepItems]()
    original: Callable[[SchedulerOutput], tuple[SchedulerOutput, StepItems]] = scheduler.take

    def take(schedule: SchedulerOutput) -> tuple[SchedulerOutput, StepItems]:
        schedule, items = original(schedule)
        seen.append(items)
        return schedule, items

    scheduler.take = take
    try:
        yield seen
    finally:
        del scheduler.take


def run_all(llm: LLM, most_steps: int = 1000) -> None:
    """Step until nothing is left; a run that does not end is a failure."""
    for _ in range(most_steps):
        if not llm.engine.has_work:
            return
        llm.engine.step()
    raise AssertionError(f"{len(llm.engine.requests)} requests are unfinished after {most_steps} steps")


def add(llm: LLM, name: str, prompt: list[int], params: SamplingParams = GREEDY, **more: object) -> Request:
    """Queue a request with the engine."""
    return llm.engine.add(name, prompt, params, **more)  # type: ignore[arg-type]


def tokens_of(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Each prompt's output tokens, all generated together."""
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params)]


def mixes_decode_and_prefill(schedule: SchedulerOutput) -> bool:
    """Whether a step has requests with one token and with many."""
    return 0 < schedule.num_decodes < len(schedule.rows)
