"""Whatever escapes from the middle of a step, every unfinished request goes on, and its text stays the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch
from attrs import evolve
from device_drafter import Foreseeing
from engine_driver import GREEDY, add, random_prompts, run_all, tokens_of
from repository import SUPPORT
from tiny_engines import everything_returned

from slotline.core import LLM, SamplingParams
from slotline.core.batch.request import Request
from slotline.core.model_runner import output_head as runner_module
from slotline.core.scheduler.integrity import check_integrity
from slotline.registry.contracts import StructuredOutputsParams
from slotline.registry.errors import CapacityError, IntegrityError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Stage = tuple[Any, str]

PROMPTS = [prompt + prompt[:4] for prompt in random_prompts([3, 30, 17, 9, 25, 5])]
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=10, logprobs=2)
SHORT = evolve(GREEDY, max_tokens=10)
PARAMS = [SHORT, evolve(DRAWN, prompt_logprobs=1), SHORT, evolve(DRAWN, seed=5, stop=("a",)), SHORT, SHORT]
WORDS = StructuredOutputsParams(regex="[a-z ]{6,30}")
SMALL: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 24, "memory": "1MiB"}
ON_DEVICE: dict[str, Any] = {
    "plugins.inline": (f"{SUPPORT / 'device_drafter.py'}:Foreseeing",),
    "drafter.name": "foreseeing",
    "drafter.tokens": 3,
    "drafter.adaptive": False,
}
MODES: dict[str, dict[str, Any]] = {
    "sync": {"scheduler.async": False},
    "async": {"scheduler.async": True},
    "drafts": {"drafter.name": "ngram"},
    "overlapped drafts": {**ON_DEVICE, "scheduler.async": True},
    "states": {"family": "bamba", "scheduler.async": True},
    "grammars": {"family": None, "structured_output.backend": "llguidance", "drafter.name": "ngram"},
    "connector": {"kv_connector.name": "host_memory", "kv_connector.host_memory.memory": "1MiB", "memory": "80KiB"},
}


@pytest.fixture(autouse=True)
def nothing_foreseen() -> Iterator[None]:
    yield
    Foreseeing.texts.clear()


CHECKERS = ("integrity.py", "output_checks.py", "engine_lock.py")
"""Files whose lines are not interrupted: what looks at a step, and the lock around it."""
OURS = ("/core/slotline/", "/structured_output/extension.py", "/structured_output/grammar_compiler.py")
"""Parts of the names of files whose lines are interrupted."""


def engine(mode: str, tiny: Tiny, engines: Engines) -> LLM:
    settings = dict(MODES[mode])
    family = settings.pop("family", "llama")
    return engines(None if family is None else tiny(family), **{**SMALL, **settings})


def params_of(mode: str) -> list[SamplingParams]:
    if mode != "grammars":
        return PARAMS
    bound = {"structured_outputs": WORDS, "ignore_eos": False, "prompt_logprobs": None}
    return [evolve(one, **bound) if index % 2 else one for index, one in enumerate(PARAMS)]


class Near(float):
    """Number that equals others near it, since products of other batches round otherwise."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3

    __hash__ = float.__hash__


def seen(request: Request) -> list[Any]:
    """What a request gave."""

    def near(entries: Any) -> Any:
        return entries and [one and {token: Near(lp.logprob) for token, lp in one.items()} for one in entries]

    ended = [request.output_token_ids, request.text, request.finish_reason, request.stop_reason]
    return [*ended, near(request.logprobs), near(request.prompt_logprobs)]


def run(llm: LLM, mode: str, step: Callable[[], object] | None = None) -> list[list[Any]]:
    """What requests give that are driven by `step`, some of them read on the way."""
    llm.engine.scheduler.cache.reset()
    given = zip(PROMPTS, params_of(mode), strict=True)
    requests = [add(llm, f"r{i}", prompt, one, stream=i % 3 == 0) for i, (prompt, one) in enumerate(given)]
    for _ in range(1000):
        if not llm.engine.has_work:
            break
        (step or llm.engine.step)()
    everything_returned(llm)
    return [seen(request) for request in requests]


def undisturbed(llm: LLM, mode: str) -> list[list[Any]]:
    expected = run(llm, mode)
    if getattr(llm.engine.extension("drafts"), "overlap", None) is not None:
        Foreseeing.texts = {tuple(p): p + e[0] for p, e in zip(PROMPTS, expected, strict=True)}
        assert run(llm, mode) == expected
    return expected


class Interruption(BaseException):
    """Comes from anywhere, as Ctrl-C does."""


def stages(llm: LLM) -> list[Stage]:
    """The parts of a step, in its order; those that the engine lacks are left out."""
    engine = llm.engine
    found: list[Stage] = [
        (engine.scheduler, "schedule"),
        (engine.scheduler.cache, "find_prefix"),
        (engine.scheduler.cache, "try_admit"),
        (engine.joining, "prepare"),
        (engine.pipeline, "admit"),
        (engine.gatherer, "gather"),
        (engine.gatherer.assembler, "assemble"),
        (engine.runner, "launch"),
        (engine.runner, "forward"),
        (engine.runner.head, "start"),
        (engine.pipeline, "apply"),
        (engine.runner.head, "_logprobs"),
        (engine.runner.head, "finish"),
        (engine.hand_out, "_count"),
        (engine.rows, "append"),
        (engine.hand_out.stops, "ended"),
        (engine.hand_out, "_keep_logprobs"),
        (engine.endings, "finish"),
        (engine.scheduler, "remove_running"),
    ]
    drafts = engine.extension("drafts")
    overlap = None if drafts is None else drafts.overlap
    more: list[Stage] = [(overlap, "settle"), (overlap, "propose"), (overlap, "place")]
    more += [(drafts.drafting if drafts is not None and overlap is None else None, "propose")]
    more += [(engine.extension("structured_output"), name) for name in ("_accept", "_force")]
    states = engine.extension("states")
    more += [(getattr(states, "dispatcher", None), "plan"), (getattr(states, "checkpoints", None), "keep")]
    transfers = getattr(engine.extension("kv_transfer"), "transfers", None)
    more += [(transfers, "start"), (transfers, "settle"), (getattr(transfers, "connector", None), "start")]
    return found + [(part, name) for part, name in more if part is not None]


@pytest.mark.spread(3)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_may_be_interrupted_in_every_part_and_no_text_changes(mode: str, tiny: Tiny, engines: Engines) -> None:
    llm = engine(mode, tiny, engines)
    expected = undisturbed(llm, mode)
    reached: list[str] = []
    left = [(*stage, late) for late in (False, True) for stage in stages(llm)]

    def interrupted_step() -> None:
        """A step whose next part is interrupted, before or after its work; if it gets there."""
        if not left:
            llm.engine.step()
            return
        part, name, late = left[0]
        original = getattr(type(part), name)

        def interrupted(*args: Any, **options: Any) -> Any:
            patch.undo()
            left.pop(0)
            reached.append(name)
            if late:
                original(*args, **options)
            raise Interruption(name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(part), name, interrupted)
            try:
                llm.engine.step()
            except Interruption:
                llm.engine.step()  # and one in between, so that every request gets on
                return
        left.append(left.pop(0))

    for _ in range(12):
        assert run(llm, mode, interrupted_step) == expected
        if not left:
            break
    assert not left, left


@pytest.mark.parametrize("mode", ["sync", "overlapped drafts", "grammars"])
def test_a_step_may_be_interrupted_at_any_line_and_no_text_changes(mode: str, tiny: Tiny, engines: Engines) -> None:
    """As a signal's handler may."""
    llm = engine(mode, tiny, engines)
    expected = undisturbed(llm, mode)
    rng, lines = Random(mode), 0
    next_at = rng.randrange(1, 1500)

    def in_line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines, next_at
        if event == "line":
            lines += 1
            if lines >= next_at:
                next_at = lines + rng.randrange(1, 6000)
                raise Interruption(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return in_line

    def in_call(frame: FrameType, *_: object) -> Any:
        name = frame.f_code.co_filename
        return in_line if any(part in name for part in OURS) and not name.endswith(CHECKERS) else None

    def step() -> None:
        before = sys.gettrace()
        sys.settrace(in_call)
        try:
            llm.engine.step()
        except Interruption:
            pass
        finally:
            sys.settrace(before)

    assert run(llm, mode, step) == expected


def test_a_function_on_logits_that_leaves_the_program_takes_no_other_request_with_it(
    tiny: Tiny, engines: Engines
) -> None:
    llm = engine("sync", tiny, engines)
    (expected,) = tokens_of(llm, [PROMPTS[0]], SHORT)

    def leave(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) == 2:
            sys.exit(7)
        return logits

    stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, SHORT)
    next(stream)
    with pytest.raises(SystemExit):
        llm.generate([PROMPTS[1]], evolve(SHORT, logits_processors=[leave]))
    last = list(stream)[-1]
    assert (last.outputs[0].token_ids, last.finished) == (expected, True)
    everything_returned(llm)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        MemoryError(),
    ],
    ids=["GPU", "CPU", "host"],
)
@pytest.mark.parametrize("asynchronous", ["sync", "async"])
def test_memory_that_ends_in_sampling_is_a_capacity_error_and_the_requests_go_on(
    error: Exception, asynchronous: str, tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(asynchronous, tiny, engines)
    expected = tokens_of(llm, PROMPTS[:2], SHORT)
    requests = [add(llm, str(index), prompt, SHORT) for index, prompt in enumerate(PROMPTS[:2])]
    llm.engine.step()
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> Any:
            raise error

        patch.setattr(runner_module, "sample_checked", full)
        for _ in range(2):
            with pytest.raises(CapacityError, match=r"(?s)does not fit into memory.*fix: lower cache\.memory"):
                llm.engine.step()
    run_all(llm)
    assert [request.output_token_ids for request in requests] == expected


def test_a_finished_request_is_reported_though_the_step_behind_it_fails(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine("async", tiny, engines)
    ending, going = add(llm, "ending", [5, 6], evolve(SHORT, max_tokens=2)), add(llm, "going", [7, 8], SHORT)
    reported: list[Request] = []
    while not ending.finished:
        with monkeypatch.context() as patch:

            def failing(launched: Any, sample: Any = llm.engine.runner.head.start) -> Any:
                if ending.finished:
                    raise Interruption
                return sample(launched)

            patch.setattr(llm.engine.runner.head, "start", failing)
            try:
                reported += llm.engine.step().finished
            except Interruption:
                break
    assert ending.finished
    assert reported == []
    while llm.engine.has_work:
        reported += llm.engine.step().finished
    assert reported == [ending, going]


def test_an_interrupted_recovery_is_made_up_for_by_the_next_call(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, twice."""
    llm = engine("sync", tiny, engines)
    (expected,) = tokens_of(llm, [PROMPTS[1]], SHORT)
    request = add(llm, "twice", PROMPTS[1], SHORT)

    def interrupted(*_: object) -> Any:
        raise Interruption

    llm.engine.step()
    llm.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.head, "start", interrupted)
        patch.setattr(llm.engine.scheduler, "restore", interrupted)
        with pytest.raises(Interruption):
            llm.engine.step()
    run_all(llm)
    assert request.output_token_ids == expected


@pytest.mark.parametrize("damage", ["all computed", "expecting a token"])
def test_the_integrity_checker_finds_a_request_that_no_step_will_go_on_with(
    damage: str, tiny: Tiny, engines: Engines
) -> None:
    llm = engine("sync", tiny, engines)
    request = add(llm, "stranded", [5, 6, 7], SHORT)
    llm.engine.step()
    if damage == "all computed":
        llm.engine.rows.num_computed_tokens[request.row] += 1
    else:
        llm.engine.rows.num_pending[request.row] = 1
    with pytest.raises(IntegrityError, match=r"'stranded' .* in flight"):
        check_integrity(llm.engine.scheduler)
    llm.engine.unsettled = True
    run_all(llm)
    assert len(request.output_token_ids) == 10
