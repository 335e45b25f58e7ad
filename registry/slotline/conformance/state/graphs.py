"""L4: a captured forward, replayed with other slots, inputs and counts. Runs on devices that capture graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from slotline.conformance.state.problems import declared_dtypes, declared_kinds, hostile, most_tokens
from slotline.conformance.state.session import Session
from slotline.registry.capability import GraphSupport
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, NotApplicable, Run, check
from slotline.testing.environments.state import Part
from slotline.testing.environments.state.surroundings import assert_output, by_rows, written_by
from slotline.testing.subject import Subject

ROWS = 4
LENGTHS = {GraphSupport.SINGLE_TOKEN: 1, GraphSupport.UNIFORM: 4, GraphSupport.ALWAYS: 4}
MIXED = (9, 1, 3)


def _cases(subject: Subject) -> Iterator[Case]:
    if subject.device.type != "cuda":
        raise NotApplicable(f"graphs are captured on CUDA, this is {subject.device.type}")
    declared_dtypes(subject)
    for kind in declared_kinds(subject):
        for level in (GraphSupport.SINGLE_TOKEN, GraphSupport.UNIFORM, GraphSupport.ALWAYS):
            if subject.capabilities.graphs.refusal(level) is None and LENGTHS[level] <= most_tokens(subject):
                yield {"kind": kind, "graphs": level.name}


@check(
    Kind.STATE,
    "state.graphs.replay",
    Level.GRAPHS,
    cases=_cases,
    needs={"graphs": GraphSupport.SINGLE_TOKEN},
    profile="graphs",
    cost=2.0,
)
def replay(run: Run) -> None:
    """Captured on padding rows, replayed with requests in other slots, other inputs and fewer requests."""
    level = GraphSupport[run["graphs"]]
    session = hostile(run, num_slots=8)
    requests = [session.request(slot) for slot in (6, 2, 7, 1)]
    session.feed([(request, 3) for request in requests])
    through = capture(session, LENGTHS[level])
    lengths = MIXED if level is GraphSupport.ALWAYS else (LENGTHS[level],) * ROWS
    for order in ((0, 1, 2, 3), (3, 0, 1), (2, 1, 3)):
        chosen = [requests[index] for index in order[: len(lengths)]]
        tokens = [session.tokens(length, seed=31 * session.steps + i) for i, length in enumerate(lengths)]
        session.step_with(list(zip(chosen, tokens, strict=False)), through=through)
    session.step([(request, 1) for request in requests])


def _verify_cases(subject: Subject) -> Iterator[Case]:
    return (case for case in _cases(subject) if case["graphs"] == GraphSupport.UNIFORM.name)


@check(
    Kind.STATE,
    "state.graphs.rollback",
    Level.GRAPHS,
    cases=_verify_cases,
    needs={"graphs": GraphSupport.UNIFORM, "rollback": True},
    profile="graphs",
    cost=2.0,
)
def replay_and_go_back(run: Run) -> None:
    """After a replayed verification a commit goes back to the accepted position, replay after replay."""
    length = LENGTHS[GraphSupport.UNIFORM]
    session = hostile(run, num_slots=8, max_draft_tokens=length - 1)
    requests = [session.request(slot) for slot in (5, 0, 3)]
    session.feed([(request, 3) for request in requests])
    through = capture(session, length)
    for accepted in ((1, 2, 3), (4, 1, 2)):
        session.step_with(
            [(request, session.tokens(length, seed=31 * session.steps + request.slot)) for request in requests],
            through=through,
        )
        session.commit({request.slot: count for request, count in zip(requests, accepted, strict=True)})


def capture(session: Session, length: int) -> Callable[[Sequence[Part]], list[list[Tensor]]]:
    """Capture forward for ROWS rows of `length` tokens, all padding. The result replays it on other rows."""
    around = session.around
    problem = around.problems[0]
    dummy = [Part(-1, session.tokens(length, seed=7), has_initial_state=False) for _ in range(ROWS)]
    batch = around.batch(dummy)
    inputs, buffers = around.inputs(0, dummy)
    plan = around.backend.plan(batch)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with around.only(0, ()):
        with torch.cuda.stream(side):
            for _ in range(2):
                around.backend.forward(problem.layer, inputs, around.state(0), plan)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = around.backend.forward(problem.layer, inputs, around.state(0), plan)

    def run_batch(parts: Sequence[Part]) -> list[list[Tensor]]:
        missing = ROWS - len(parts)
        left = ROWS * length - sum(part.count for part in parts)
        counts = [left // missing] * missing if missing else []
        padding = [Part(-1, session.tokens(count, seed=8), has_initial_state=False) for count in counts]
        padded = [*parts, *padding]
        new, (_, new_buffers) = around.batch(padded), around.inputs(0, padded)
        for name in ("query_start_loc", "slots", "has_initial_state", "num_accepted"):
            getattr(batch, name).copy_(getattr(new, name))
        for buffer, value in zip(buffers, new_buffers, strict=True):
            buffer[: value.shape[0]].copy_(value)
        batch.num_requests, batch.num_tokens = len(parts), sum(part.count for part in parts)
        batch.max_query_len = max(part.count for part in parts)
        batch.num_decodes = new.num_decodes if batch.max_query_len == 1 else 0
        batch.query_start_loc_cpu = new.query_start_loc_cpu[: len(parts) + 1]
        with around.only(0, written_by(parts)):
            around.backend.plan(batch)
            graph.replay()
        assert_output(output, inputs, problem, padded)
        return [by_rows(output, parts)]

    return run_batch
