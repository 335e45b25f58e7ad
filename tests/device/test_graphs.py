"""Captured graphs as far as a CPU can show them: the order of a capture, and memory that is read without being held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from attrs import evolve

from slotline.backends.cuda.compiler import steps
from slotline.builder import dry_runs as rehearsal
from slotline.builder import graph_capture as capturing
from slotline.builder import graph_capturer as graphs
from slotline.builder.graph_capture import WARM_UPS, GraphCapture
from slotline.builder.graph_capturer import GraphCapturer
from slotline.builder.made_up import made_up_inputs
from slotline.core import LLM
from slotline.core.batch.graph_dispatcher import GraphDispatcher, GraphShape
from slotline.core.device.cpu_ops import CpuOps
from slotline.core.device.transfer_buffer import CpuTransferBuffer
from slotline.kernels.graph_capture_state import alias_without_ownership
from slotline.registry.contracts.prefix_groups import MAX_SEGMENTS
from slotline.registry.engine_reports import CaptureReport
from slotline.registry.errors import CapacityError, IntegrityError, ModelError


def test_an_unowned_tensor_is_the_same_memory_and_does_not_hold_it() -> None:
    whole = torch.randn(6, 8, 10, dtype=torch.bfloat16)
    part = whole[1:4, 2:5]
    same = alias_without_ownership(part)
    assert (same.data_ptr(), same.shape, same.stride(), same.dtype) == (
        part.data_ptr(),
        part.shape,
        part.stride(),
        part.dtype,
    )
    same += 1
    assert torch.equal(same, part)
    alive = weakref.ref(whole)
    del whole, part
    gc.collect()
    assert alive() is None


@pytest.mark.behaviour(92, 131)
def test_the_calls_between_graphs_work_on_the_memory_of_the_forward_and_hold_none_of_it(
    tiny: Callable[..., Path], engines: Callable[..., LLM]
) -> None:
    engine = engines(tiny("gemma3")).engine
    router, model = engine.runner.router, engine.runner.model
    calls: list[Callable[[], None]] = []
    queries: list[Any] = []

    def now(call: Callable[[], None]) -> None:
        calls.append(call)
        call()

    breaking = capturing.breaking(router, {group.name for group in router.groups}, now)

    def watched(layer: Any, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        queries.append(weakref.ref(query))
        return breaking(layer, query, *rest)

    with torch.inference_mode():
        inputs = made_up_inputs(engine.gatherer, [3, 5], vocab_size=50)
        attend = router.plan(inputs.batches)
        expected = model.forward(inputs.input_ids, inputs.positions, attend)
        found = model.forward(inputs.input_ids, inputs.positions, watched)
    assert torch.equal(found, expected)
    gc.collect()
    assert len(calls) == len(queries) == sum(len(group.layers) for group in router.groups)
    assert all(query() is None for query in queries)


class PretendedRecorder:
    """Notes where graphs begin and end, since only a CUDA device has any."""

    def __init__(self, events: list[str], parts: list[Callable[[], None]]) -> None:
        self.events, self.parts, self.graphs = events, parts, 0

    def begin(self) -> None:
        self.events.append("begin")

    def end(self) -> None:
        self.events.append("end")
        self.parts.append(lambda: self.events.append("replay"))
        self.graphs += 1

    def cut(self, call: Callable[[], None]) -> None:
        self.end()
        self.parts.append(call)
        self.begin()


class PretendedCapturing:
    pool = what = None

    def __enter__(self) -> PretendedCapturing:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def report(self, shapes: int, graphs: int) -> CaptureReport:
        return CaptureReport(shapes=shapes, graphs=graphs)


@pytest.fixture
def capture(
    tiny: Callable[..., Path], engines: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[GraphCapturer, list[str]]]:
    """Captures one and two decoding requests in pretended graphs; what happens is noted."""
    events: list[str] = []
    monkeypatch.setattr(graphs, "Recorder", lambda pool, parts: PretendedRecorder(events, parts))
    monkeypatch.setattr(graphs, "GraphCapture", lambda fix, device: PretendedCapturing())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def made(state: str) -> tuple[GraphCapturer, list[str]]:
        engine = engines(tiny("llama")).engine
        runner = engine.runner
        plan = evolve(
            engine.plan, groups=tuple(evolve(group, graphs=(("decode", state),)) for group in engine.plan.groups)
        )
        forward = runner.model.forward

        def noted(token_ids: torch.Tensor, positions: torch.Tensor, attend: Any, *rest: Any, **more: Any) -> Any:
            def attention(*given: Any) -> torch.Tensor:
                events.append("attention")
                return attend(*given)

            events.append("forward")
            return forward(token_ids, positions, attention, *rest, **more)

        monkeypatch.setattr(runner.model, "forward", noted)
        shapes = GraphDispatcher({"decode": "full"}, [1, 2], query_len=1, max_requests=2, max_tokens=8)
        made = GraphCapturer(
            runner.model, runner.router, engine.gatherer, plan, shapes, engine.cascade, runner.last_tokens
        )
        made.capture()
        monkeypatch.setattr(made, "addresses", lambda inputs: made.captured[inputs.shape].addresses)
        monkeypatch.setattr(runner, "graphs", made)
        return made, events

    return made


@pytest.mark.behaviour(147)
@pytest.mark.parametrize("state", ["captured", "eager"])
def test_every_shape_runs_eagerly_with_its_attention_before_it_is_captured(
    state: str, capture: Callable[[str], tuple[GraphCapturer, list[str]]]
) -> None:
    made, events = capture(state)
    layers = sum(len(group.layers) for group in made._router.groups)
    warm_up = ["forward"] + ["attention"] * layers
    inside = (["attention"] if state == "captured" else ["attention", "end", "begin"]) * layers
    assert events == (WARM_UPS * warm_up + ["begin", "forward", *inside, "end"]) * 2
    assert made.report.graphs == (2 if state == "captured" else 2 * (layers + 1))


def test_eager_runs_before_a_capture_read_few_keys_and_are_planned_for_the_longest(
    capture: Callable[[str], tuple[GraphCapturer, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = capture("captured")
    forward, seen = made._forward, list[tuple[list[int], int]]()

    def noted(inputs: Any, attend: Any, further: Any) -> Any:
        (batch,) = inputs.batches
        seen.append((batch.seq_lens.tolist(), batch.max_seq_len))
        return forward(inputs, attend, further)

    monkeypatch.setattr(made, "_forward", noted)
    monkeypatch.setattr(made, "addresses", lambda inputs: ())
    longest = made._gatherer.rows.max_model_len
    made._capture(GraphShape(2, 1), None)
    assert seen[0] == ([1, 1], longest)
    seen.clear()
    made._capture(GraphShape(2, 1, cascade=1), None)  # the prefix is a part of them
    assert seen[0] == ([longest, longest], longest)


@pytest.mark.parametrize(
    ("error", "typed", "says"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            CapacityError,
            r"capturing the forward of 2 tokens does not fit into memory[\s\S]*the largest of graphs.sizes",
        ),
        (
            RuntimeError("operation not permitted when stream is capturing\nmore"),
            ModelError,
            r"the forward of 2 tokens cannot be captured: operation not permitted when stream is\D*none",
        ),
    ],
)
def test_what_goes_wrong_in_a_capture_is_a_typed_error_with_its_remedy(
    error: RuntimeError,
    typed: type[Exception],
    says: str,
    capture: Callable[[str], tuple[GraphCapturer, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _ = capture("captured")
    made.captured.clear()
    made.device = MagicMock()
    monkeypatch.setattr(graphs, "GraphCapture", GraphCapture)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(made._model, "forward", fail)
    with pytest.raises(typed, match=says):
        made.capture()
    assert not made.captured
    assert gc.isenabled()


@pytest.mark.behaviour(138)
def test_made_up_steps_replay_what_was_captured_or_run_eagerly_and_nothing_between(
    capture: Callable[[str], tuple[GraphCapturer, list[str]]], tiny: Callable[..., Path], engines: Callable[..., LLM]
) -> None:
    made, events = capture("captured")
    engine = engines(tiny("llama")).engine
    gatherer, runner = engine.gatherer, engine.runner
    for shape, expected in ((GraphShape(2, 1), {"replay"}), (None, {"forward", "attention"})):
        events.clear()
        runner.run(made_up_inputs(gatherer, [1, 1], shape=shape))
        assert set(events) == expected
    for other in (GraphShape(4, 1), GraphShape(2, 2), GraphShape(2, 1, cascade=1)):
        with pytest.raises(IntegrityError, match="no graph of GraphShape"):
            runner.run(made_up_inputs(gatherer, [2] if other.query_len == 2 else [1, 1], shape=other))
    assert len(made.captured) == 2


@pytest.mark.behaviour(27, 92)
@pytest.mark.parametrize(
    ("state", "once", "planned"), [("captured", True, 0), ("captured", False, 1), ("eager", True, 1)]
)
def test_a_replay_is_planned_unless_the_plans_of_its_capture_serve_it(
    state: str,
    once: bool,
    planned: int,
    capture: Callable[[str], tuple[GraphCapturer, list[str]]],
    tiny: Callable[..., Path],
    engines: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engines(tiny("llama")).engine
    router = engine.runner.router
    monkeypatch.setattr(router, "groups", tuple(evolve(group, plan_once=once) for group in router.groups))
    made, _ = capture(state)
    (group,) = router.groups
    plans: list[int] = []
    plan = type(group.backend).plan
    monkeypatch.setattr(group.backend, "plan", lambda batch: (plans.append(1), plan(group.backend, batch))[1])
    monkeypatch.setattr(made, "replay", lambda inputs: (torch.zeros(2, 1), None, None))
    engine.runner.launch(made_up_inputs(engine.gatherer, [1, 1], shape=GraphShape(2, 1)))
    assert len(plans) == planned
    assert not made.precomputed_groups(
        GraphShape(2, 1, cascade=1)
    )  # a prefix of another length may be served in another way
    engine.runner.launch(made_up_inputs(engine.gatherer, [1, 1]))
    assert len(plans) == planned + 1


@pytest.mark.behaviour(138)
@pytest.mark.parametrize("state", ["captured", "eager"])
def test_made_up_steps_are_longer_than_the_prefix_that_they_share(
    state: str, capture: Callable[[str], tuple[GraphCapturer, list[str]]]
) -> None:
    made, _ = capture(state)
    inputs, _ = made.made_up(GraphShape(2, 1, cascade=1))
    for batch in inputs.batches:
        assert 0 < batch.common_prefix_len < int(batch.seq_lens.min())
    inputs, _ = made.made_up(GraphShape(4, 1, cascade=2))
    for batch in inputs.batches:
        assert batch.prefix_groups is not None
        assert batch.common_prefix_len == 0
        assert batch.prefix_groups.segments.shape == (MAX_SEGMENTS, 4)
        assert 0 < int(batch.prefix_groups.segments[0, 2]) < int(batch.seq_lens.min())
        assert batch.prefix_groups.segments.data_ptr() in type(made).addresses(made, inputs)


@pytest.mark.behaviour(30)
def test_buffers_of_made_up_steps_are_written_again_only_when_their_copies_are_over(
    capture: Callable[[str], tuple[GraphCapturer, list[str]]],
    tiny: Callable[..., Path],
    engines: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captures and rehearsals prepare one step behind the other and run none: each says what the next waits for."""
    engine, calls = engines(tiny("llama")).engine, list[str]()
    for name in ("begin", "mark"):
        monkeypatch.setattr(CpuTransferBuffer, name, lambda self, name=name: calls.append(name))
    made, _ = capture("captured")
    made.made_up(GraphShape(2, 1))
    assert calls == ["begin", "mark", "mark"] * 2 + ["begin", "mark"]
    calls.clear()
    monkeypatch.setattr(capturing, "Recorder", lambda pool, parts, replayed: PretendedRecorder([], parts))
    monkeypatch.setattr(capturing, "GraphCapture", lambda fix, device: PretendedCapturing())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    router = engine.runner.router
    monkeypatch.setattr(router, "groups", tuple(evolve(group, any_captured=True) for group in router.groups))
    made_up = list(steps(16, engine.rows.max_requests, engine.rows.max_model_len))
    rehearsal.record_launches(router, engine.gatherer, torch.float32, made_up, {})
    assert calls == ["begin", "mark"] * len(made_up)


@pytest.fixture
def rehearsed(
    tiny: Callable[..., Path], engines: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[str], int]]:
    """Rehearses three steps in pretended graphs: what happened, and the number of the model's layers.

    What happens between a begin and an end would be recorded.
    """

    def run(broken: bool, fails: int = 0) -> tuple[list[str], int]:
        engine, events = engines(tiny("llama")).engine, list[str]()
        runner, made_up = engine.runner, partial(made_up_inputs, engine.gatherer)
        monkeypatch.setattr(capturing, "Recorder", lambda pool, parts, replayed: PretendedRecorder(events, parts))
        monkeypatch.setattr(capturing, "GraphCapture", lambda fix, device: PretendedCapturing())
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        plan, forward, head = runner.plan, runner.model.forward, runner.model.compute_logits
        serve, draw = runner.router.serve, rehearsal.sample_checked

        def noted(event: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def noting(*given: Any, **named: Any) -> Any:
                events.append(event)
                if events.count("forward") == fails and event == "forward":
                    raise RuntimeError("operation not permitted when stream is capturing")
                return call(*given, **named)

            return noting

        monkeypatch.setattr(runner, "plan", noted("plan", plan))
        monkeypatch.setattr(runner.model, "forward", noted("forward", forward))
        monkeypatch.setattr(runner.model, "compute_logits", noted("logits", head))
        monkeypatch.setattr(rehearsal, "sample_checked", noted("draw", draw))
        monkeypatch.setattr(runner.router, "serve", noted("attention", serve))
        names = {group.name for group in runner.router.groups} if broken else set()
        steps = (made_up(lens, vocab_size=50) for lens in ([3, 5], [1], [16]))
        calls = chain((rehearsal.draws(2, 64, "cpu", CpuOps()),), rehearsal.forwards(runner, steps, names))
        capturing.note_lacking(calls, {}, "profile and warm-up", replayed=False)
        return events, sum(len(group.layers) for group in runner.router.groups)

    return run


@pytest.mark.parametrize("broken", [False, True])
def test_first_steps_are_planned_and_recorded_from_the_forward_to_the_draws(
    broken: bool, rehearsed: Callable[..., tuple[list[str], int]]
) -> None:
    """Planning is not recorded, since it copies and waits; nor is attention that cannot be captured, nor run."""
    events, layers = rehearsed(broken)
    start = events.index("plan")
    assert events[:start] == ["begin", "draw", "draw", "end"]
    inside = (["end", "begin"] if broken else ["attention"]) * layers
    assert events[start:] == ["plan", "begin", "forward", *inside, "logits", "end"] * 3


def test_a_first_step_that_cannot_be_recorded_is_told_and_left_to_its_launches(
    rehearsed: Callable[..., tuple[list[str], int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PretendedRecorder, "give_up", lambda self: self.events.append("give up"), raising=False)
    with caplog.at_level("INFO", "slotline"):
        events, _ = rehearsed(False, fails=2)
    assert events[-4:] == ["plan", "begin", "forward", "give up"]
    assert events.count("forward") == 2, "the third is not looked at"
    assert "the kernels of profile and warm-up are not all compiled ahead: operation not permitted" in caplog.text
