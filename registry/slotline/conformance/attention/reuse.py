"""One backend object over many batches, and results that must be bitwise the same."""

from __future__ import annotations

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.attention import BACKEND_THREADS, bits, threads
from slotline.testing.environments.attention_choice import build, chosen, examine, world, writes_cache
from slotline.testing.environments.attention_shapes import SHAPES, decode, mixed, with_empty_rows
from slotline.testing.environments.attention_variants import in_place, leave_stale_needles, of_last_tokens, only, tail


@check(Kind.ATTENTION, "attention.reuse.batches", Level.HOSTILE)
def batches(run: Run) -> None:
    """One object serves batches of other sizes, lengths and tables: nothing is kept from the batch before."""
    case = chosen(run, mixed)
    backend = build(run, case, num_threads=BACKEND_THREADS)
    shapes = list(SHAPES.values())
    for shape in (*shapes, *reversed(shapes)):
        examine(run, world(run, chosen(run, with_empty_rows(shape(case.block_size)))), backend)


@check(Kind.ATTENTION, "attention.reuse.sizes", Level.HOSTILE)
def sizes(run: Run) -> None:
    """Batches that grow and shrink, with lengths that grow and shrink."""
    case = chosen(run, mixed)
    backend = build(run, case)
    for count, length in ((1, 3), (9, 40), (2, 150), (20, 7), (1, 1), (5, 90)):
        requests = tuple((1, length + index) for index in range(count))
        examine(run, world(run, chosen(run, requests)), backend)


@check(Kind.ATTENTION, "attention.reuse.tables", Level.HOSTILE)
def tables(run: Run) -> None:
    """The same lengths with other blocks, and the same blocks with other lengths, give each their own answer."""
    first = world(run, chosen(run, decode))
    backend = build(run, first.case)
    examine(run, first, backend)
    for seed in (1, 2):
        examine(run, first.changed(seed=first.case.seed + seed), backend)
    shorter = first.changed(requests=tuple((q, max(q, length - 1)) for q, length in first.case.requests))
    examine(run, shorter, backend)


@check(Kind.ATTENTION, "attention.reuse.in_place", Level.HOSTILE)
def same_tensors(run: Run) -> None:
    """The next step's batch may lie in the same tensors: plans do not outlive their step, caches of them neither."""
    made = world(run, chosen(run, lambda p: ((1, p), (1, 2 * p + 1), (1, 3))))
    backend = build(run, made.case)
    examine(run, made, backend)
    other = in_place(made)
    examine(run, other, backend)


@check(Kind.ATTENTION, "attention.reuse.several_plans", Level.HOSTILE)
def several_plans(run: Run) -> None:
    """With several_plans, a step is planned again for the last query tokens of some requests.

    All keys of the step are stored before, as for a last layer whose other outputs are not needed. The first plan stays
    valid.
    """
    if not run.subject.capabilities.several_plans:
        raise NotApplicable("a plan may end with the next one: several_plans is not declared")
    if writes_cache(run):
        raise NotApplicable("forward stores the new tokens itself: writes_cache is declared")
    made = world(run, chosen(run, mixed))
    backend = build(run, made.case)
    _, key, value = made.new_tokens()
    with threads(1):
        plan = backend.plan(made.batch)
        backend.write(made.layer, key, value, made.cache, plan)
    some = of_last_tokens(made, [index % 3 != 2 for index in range(len(made.case.requests))])
    out, lse = some.run(backend, writes_cache=True)
    some.check(out, lse, run=run, base=run.subject.capabilities.lse_base)
    out, lse = made.step(backend, plan, writes_cache=True)
    made.check(out, lse, run=run, base=run.subject.capabilities.lse_base)


@check(Kind.ATTENTION, "attention.reuse.stale", Level.HOSTILE)
def stale(run: Run) -> None:
    """Slots after a request's last token hold another request's old tokens, which would win every softmax."""
    made = world(run, chosen(run, lambda p: ((1, p + 2), (3, 2 * p + 1), (1, 1), (p + 1, 2 * p + 3))))
    leave_stale_needles(made)
    examine(run, made)


@check(
    Kind.ATTENTION,
    "attention.invariance.batch",
    Level.HOSTILE,
    needs={"batch_invariant": True},
)
def batch_invariance(run: Run) -> None:
    """A request's output is bitwise the same by itself and in any batch, in any place."""
    made = world(run, chosen(run, mixed, batch_invariant=True))
    together, _ = made.run(build(run, made.case), writes_cache(run))
    starts = made.batch.query_start_loc_cpu
    for request in range(len(made.case.requests)):
        alone = only(made, request)
        out, _ = alone.run(build(run, alone.case), writes_cache(run))
        if not torch.equal(bits(out), bits(together[starts[request] : starts[request + 1]])):
            raise Failed(
                f"request {request} {made.case.requests[request]} gives other bits alone than in the batch; "
                "batch_invariant is declared"
            )


@check(
    Kind.ATTENTION,
    "attention.invariance.steps",
    Level.HOSTILE,
    needs={"batch_invariant": True},
)
def step_invariance(run: Run) -> None:
    """A token's output is bitwise the same whether its request's tokens come in one step or in several."""
    made = world(run, chosen(run, lambda p: ((2 * p + 3, 4 * p + 7), (p + 1, p + 1)), batch_invariant=True))
    whole, _ = made.run(build(run, made.case), writes_cache(run))
    starts = made.batch.query_start_loc_cpu
    for request, (query_len, _) in enumerate(made.case.requests):
        for count in dict.fromkeys((1, query_len // 2, query_len - 1)):
            part = tail(made, request, count)
            out, _ = part.run(build(run, part.case), writes_cache(run))
            if not torch.equal(bits(out[:count]), bits(whole[starts[request + 1] - count : starts[request + 1]])):
                raise Failed(
                    f"the last {count} of {query_len} query tokens of request {request} get other bits in a step of "
                    "their own; batch_invariant is declared"
                )


@check(Kind.ATTENTION, "attention.determinism.runs", Level.HOSTILE, mandatory=False)
def determinism(run: Run) -> None:
    """The same step twice gives the same bits."""
    made = world(run, chosen(run, mixed))
    backend = build(run, made.case)
    first, _ = made.run(backend, writes_cache(run))
    second, _ = made.run(backend, writes_cache(run))
    if not torch.equal(bits(first), bits(second)):
        raise Failed("the same step gave other bits the second time")
