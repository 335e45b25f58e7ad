"""L4: a captured step replayed with other lengths, tables and requests. Runs on devices that capture graphs.

`slotline.registry.contracts.attention` has the rules for a captured backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from slotline.registry.capability import GraphSupport
from slotline.registry.contracts.prefix_groups import MAX_LEVELS
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.attention_case import Case as AttentionCase
from slotline.testing.environments.attention_choice import (
    build,
    chosen,
    device_of,
    longest_query,
    maker,
    refusal,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_graphs import (
    CapturedStep,
    GraphPool,
    Recorder,
    announce_common_prefix,
    cuda_graph,
)
from slotline.testing.environments.attention_shapes import decode
from slotline.testing.subject import Subject

ROWS = 4
QUERY_LEN = {GraphSupport.SINGLE_TOKEN: 1, GraphSupport.UNIFORM: 4, GraphSupport.ALWAYS: 4}
MIXED = ((1, 9, 3, 2), (4, 1), (0, 5, 1, 1), (16,), (1, 1, 1, 1))
ONE_CAPTURE = {"graphs": GraphSupport.SINGLE_TOKEN}
LAG = 200_000_000
"""Cycles that the device sleeps, so that the host runs ahead of it."""


def by_level(subject: Subject) -> Iterable[Case]:
    """Return each declared graph level, with a window and with latents if those are declared."""
    if subject.device.type != "cuda":
        raise NotApplicable(f"graphs are captured on CUDA devices, this is {subject.device.type}")
    return cases_of_levels(subject)


def cases_of_levels(subject: Subject) -> list[dict[str, object]]:
    """Return the cases of `by_level`, on any device."""
    rows: list[dict[str, object]] = []
    for fields in ({}, {"window": 9}, {"mla": True}):
        needs = {"sliding_window": "window" in fields, "mla": "mla" in fields}
        if refusal(subject, needs) is None:
            rows += [
                {"graphs": level.name, **fields}
                for level, length in QUERY_LEN.items()
                if refusal(subject, {**needs, "graphs": level}) is None and longest_query(subject, fields) >= length
            ]
    return rows


@check(Kind.ATTENTION, "attention.graphs.replay", Level.GRAPHS, needs=ONE_CAPTURE, cases=by_level, cost=2.0)
def replay(run: Run) -> None:
    """A captured step follows new lengths, new block tables, other requests in its rows, and fewer requests.

    Where `plan_once` is declared, every second replay is not planned.
    """
    replays(run, cuda_graph)


@check(Kind.ATTENTION, "attention.graphs.ahead", Level.GRAPHS, needs=ONE_CAPTURE, cases=by_level, cost=2.0)
def ahead(run: Run) -> None:
    """The next step is planned and launched while the device still runs the last: no buffer is overwritten early."""
    runs_ahead(run, cuda_graph)


def replays(run: Run, record: Recorder) -> None:
    """Run the body of `replay`, with any recorder."""
    pool, stage = _captured(run, record)
    requests = _admit(pool, run, (5, 18, 1, 40, 33, 16))
    for number, (order, counts) in enumerate(_batches(run)):
        _one(stage, {requests[index]: count for index, count in zip(order, counts, strict=True)}, f"replay {number}")
    pool.finish(requests[1])
    requests[1:2] = _admit(pool, run, (23,))
    for number in range(3):
        order, counts = _batches(run)[number]
        _one(
            stage,
            {requests[index]: count for index, count in zip(order, counts, strict=True)},
            "after a reuse of blocks",
        )
        _poison_free_memory(pool)
        pool.step({requests[5]: 1}, run)  # a step in eager mode in between


def runs_ahead(run: Run, record: Recorder) -> None:
    """Run the body of `ahead`, with any recorder."""
    pool, stage = _captured(run, record)
    requests = _admit(pool, run, (5, 18, 1, 40, 33, 16))
    steps = []
    for order, counts in _batches(run):
        steps.append(pool.prepare({requests[index]: count for index, count in zip(order, counts, strict=True)}))
    if pool.home.device.type == "cuda":
        torch.cuda._sleep(LAG)
    outs = [stage.launch(step) for step in steps]
    for number, (step, out) in enumerate(zip(steps, outs, strict=True)):
        stage.check(step, out, f"replay {number} of {len(steps)} without waiting")


@check(Kind.ATTENTION, "attention.graphs.no_sync", Level.GRAPHS, needs=ONE_CAPTURE, cases=by_level, cost=0.5)
def no_sync(run: Run) -> None:
    """Neither write nor forward waits for the device, also where they are not captured."""
    made = world(run, chosen(run, decode, padding=0))
    backend = build(run, made.case)
    out, _ = made.run(backend, writes_cache(run))  # compiles kernels, and may wait
    query, key, value = made.new_tokens()
    target = torch.empty_like(out)
    plan = backend.plan(made.batch)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if not writes_cache(run):
            backend.write(made.layer, key, value, made.cache, plan)
        backend.forward(made.layer, query, key, value, made.cache, plan, target, made.sinks)
    except RuntimeError as error:
        raise Failed(f"write or forward waits for the device: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
    made.check(target, run=run)


@check(Kind.ATTENTION, "attention.graphs.memory", Level.GRAPHS, needs=ONE_CAPTURE, cases=by_level, cost=1.0)
def memory(run: Run) -> None:
    """Plans and replays keep no more memory from step to step."""
    pool, stage = _captured(run, cuda_graph)
    requests = _admit(pool, run, (5, 18, 1, 40, 33, 16))
    order, counts = _batches(run)[0]
    step = pool.prepare({requests[index]: count for index, count in zip(order, counts, strict=True)})
    held = []
    for _ in range(12):
        stage.launch(step)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    if held[-1] > held[3]:
        raise Failed(f"device memory grew by {held[-1] - held[3]} bytes in 8 steps of one shape")


def of_a_cascade(subject: Subject) -> Iterable[Case]:
    """Return one case if a batch with a common prefix can be captured."""
    if subject.device.type != "cuda":
        raise NotApplicable(f"graphs are captured on CUDA devices, this is {subject.device.type}")
    if (why := refusal(subject, {**ONE_CAPTURE, "cascade": True})) is not None:
        raise NotApplicable(why)
    return [{}]


@check(
    Kind.ATTENTION,
    "attention.graphs.cascade",
    Level.GRAPHS,
    needs={**ONE_CAPTURE, "cascade": True},
    cases=of_a_cascade,
    cost=2.0,
)
def cascade(run: Run) -> None:
    """A captured step with a common prefix follows prefixes of other lengths, and fewer requests."""
    replays_of_a_cascade(run, cuda_graph)


def replays_of_a_cascade(run: Run, record: Recorder) -> None:
    """Run the body of `cascade`, with any recorder."""
    case = chosen(run, ((1, 64),))
    pool = _pool(run, case)
    stage = CapturedStep(pool, ROWS, 1, mixed=False, record=record, cascade=True)
    families = []
    for parent in _admit(pool, run, (90, 35, 64)):
        families.append([parent, *(pool.fork(parent) for _ in range(ROWS - 1))])
    for number in range(3):
        for family in families:
            for requests in (family, family[1:3]):
                step = pool.prepare(dict.fromkeys(requests, 1))
                prefix = announce_common_prefix(step)
                stage.check(step, stage.launch(step), f"replay {number} with a common prefix of {prefix} tokens")


def of_groups(subject: Subject) -> Iterable[Case]:
    """Return one case if a batch with prefixes of groups can be captured."""
    if subject.capabilities.cascade_prefixes == "one":
        raise NotApplicable('cascade_prefixes is "one"')
    return of_a_cascade(subject)


@check(
    Kind.ATTENTION,
    "attention.graphs.prefix_groups",
    Level.GRAPHS,
    needs={**ONE_CAPTURE, "cascade": True},
    cases=of_groups,
    cost=2.0,
)
def groups(run: Run) -> None:
    """A captured step with prefixes of groups follows other groups, other levels, and fewer requests."""
    replays_of_groups(run, cuda_graph)


def replays_of_groups(run: Run, record: Recorder) -> None:
    """Run the body of `groups`, with any recorder."""
    levels = MAX_LEVELS if run.subject.capabilities.cascade_prefixes == "levels" else 1
    pool = _pool(run, chosen(run, ((1, 64),)))
    stage = CapturedStep(pool, ROWS, 1, mixed=False, record=record, levels=levels)
    families = [[parent, pool.fork(parent)] for parent in _admit(pool, run, (66, 35))]
    for family in families:  # the third shares more with the first than the second does
        _compute(pool, run, family[0], 2 * pool.case.block_size + 1)
        family.append(pool.fork(family[0]))
    one, other = families
    orders = [*one, other[0]], [one[0], *other[:2], one[1]], [other[2], one[1], other[0]], [one[2], *other]
    for number in range(3):
        for requests in orders:
            step = pool.prepare(dict.fromkeys(requests, 1))
            stage.check(step, stage.launch(step), f"replay {number} with prefixes of groups")


def _pool(run: Run, case: AttentionCase) -> GraphPool:
    device, stores = device_of(run.subject), writes_cache(run)
    return GraphPool(case, build(run, case), longest=160, device=device, writes_cache=stores, world=maker(run))


def _captured(run: Run, record: Recorder) -> tuple[GraphPool, CapturedStep]:
    level = GraphSupport[run["graphs"]]
    length = QUERY_LEN[level]
    case = chosen(run, ((ROWS * length, 64),) if level is GraphSupport.ALWAYS else ((length, 64),))
    pool = _pool(run, case)
    once = run.subject.capabilities.plan_once.refusal(True) is None
    mixed = level is GraphSupport.ALWAYS
    return pool, CapturedStep(pool, ROWS, length, mixed=mixed, record=record, plan_once=once)


def _batches(run: Run) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return the requests of each batch and their numbers of tokens."""
    orders = ((0, 1, 2, 3), (3, 0), (4, 2, 1, 0), (5,), (1, 4, 0, 2))
    level = GraphSupport[run["graphs"]]
    if level is GraphSupport.ALWAYS:
        return list(zip(orders, MIXED, strict=True))
    return [(order, (QUERY_LEN[level],) * len(order)) for order in orders]


def _admit(pool: GraphPool, run: Run, lengths: Sequence[int]) -> list[int]:
    """Add requests with prompts, computed in eager mode in pieces that the backend accepts."""
    numbers = []
    for length in lengths:
        numbers.append(number := pool.admit())
        _compute(pool, run, number, length)
    return numbers


def _compute(pool: GraphPool, run: Run, number: int, count: int) -> None:
    """Compute new tokens of a request in eager mode, in pieces that the backend accepts."""
    most = longest_query(run.subject, {"window": pool.case.window})
    for start in range(0, count, most):
        pool.step({number: min(most, count - start)}, run)


def _one(stage: CapturedStep, new_tokens: dict[int, int], what: str) -> None:
    """Check one replay. The cache must contain the new tokens and nothing else new."""
    step = stage.pool.prepare(new_tokens)
    expected = step.written()
    out = stage.launch(step)
    stage.check(step, out, what)
    if expected is not None:
        step.expect_cache(expected, f"{what}: the cache must hold the new tokens at their slots, all else kept")


def _poison_free_memory(pool: GraphPool) -> None:
    """Fill freed memory, so that a capture that reads a plan's freed tensors reads garbage."""
    junk = [torch.full((1 << size,), -1, dtype=torch.int32, device=pool.home.device) for size in range(4, 14)]
    del junk
