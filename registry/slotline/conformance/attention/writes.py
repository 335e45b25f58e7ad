"""The write path: the right slots, all of them, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.attention import World, threads
from slotline.testing.environments.attention_choice import (
    build,
    chosen,
    dtype_pairs,
    layouts,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_shapes import mixed
from slotline.testing.environments.attention_variants import redrawn
from slotline.testing.subject import Subject


def by_pair_and_layout(subject: Subject) -> Iterable[Case]:
    """Return each declared dtype pair and each layout."""
    pairs, orders = dtype_pairs(subject), layouts(subject)
    return [
        {"dtype": pairs[i % len(pairs)][0], "kv_dtype": pairs[i % len(pairs)][1], "layout": orders[i % len(orders)]}
        for i in range(max(len(pairs), len(orders)))
    ]


def _step(run: Run, made: World) -> None:
    """Store the new tokens, by `write` or by a `forward` that does it."""
    made.run(build(run, made.case), writes_cache(run))


def _write_only(run: Run, made: World) -> None:
    """Do the work of `_step` and ignore the output, which may be anything if a token of the request is missing."""
    backend, expected = build(run, made.case), made.written()
    query, key, value = made.new_tokens()
    out = torch.zeros(len(query), made.case.num_heads, made.layer.head_size_v, dtype=query.dtype, device=query.device)
    with threads(1):
        plan = backend.plan(made.batch)
        if writes_cache(run):
            backend.forward(made.layer, query, key, value, made.cache, plan, out, made.sinks)
        else:
            backend.write(made.layer, key, value, made.cache, plan)
    if expected is not None:
        made.expect_cache(expected, "tokens of slot -1 must not be stored, the others must")


@check(Kind.ATTENTION, "attention.write.slots", Level.HOSTILE, cases=by_pair_and_layout)
def slots(run: Run) -> None:
    """Each new key and value is in its slot, converted to the cache's dtype, and no other byte changed."""
    _step(run, world(run, chosen(run, mixed)))


@check(
    Kind.ATTENTION,
    "attention.write.skipped",
    Level.HOSTILE,
    cases=lambda _: [{"skip": which} for which in ("some", "first", "last", "all")],
)
def skipped(run: Run) -> None:
    """Slot -1 is never written, even if the whole batch has it, and the other slots are."""
    made = world(run, chosen(run, lambda p: ((1, p + 1), (1, 5), (p + 4, p + 4), (3, 2 * p))))
    tokens = made.batch.num_tokens
    which = {
        "some": list(range(0, tokens, 3)),
        "first": [0],
        "last": [tokens - 1],
        "all": list(range(tokens)),
    }[run["skip"]]
    made.batch.slot_mapping[which] = -1
    _write_only(run, made)


@check(Kind.ATTENTION, "attention.write.stored_before", Level.HOSTILE)
def stored_before(run: Run) -> None:
    """A batch whose tokens are in the cache already, all slots -1, is served from the cache."""
    made = world(run, chosen(run, lambda p: ((1, p + 1), (1, 5), (3, 2 * p + 1))))
    for request, (_, length) in enumerate(made.case.requests):
        made.store(request, range(length))
    made.batch.slot_mapping[:] = -1
    out, _ = made.run(build(run, made.case), writes_cache(run))
    made.check(out, run=run)


@check(Kind.ATTENTION, "attention.write.plain", Level.HOSTILE)
def stored_by_the_model(run: Run) -> None:
    """With plain_writes, new tokens that the model stored at their slots are served, though `write` is not called."""
    if not run.subject.capabilities.plain_writes:
        raise NotApplicable("write may do more than store: plain_writes is not declared")
    made = world(run, chosen(run, mixed))
    for request, (_, length) in enumerate(made.case.requests):
        made.store(request, range(length))
    out, _ = made.run(build(run, made.case), writes_cache=True)
    made.check(out, run=run)


@check(Kind.ATTENTION, "attention.write.again", Level.HOSTILE)
def written_again(run: Run) -> None:
    """A slot that was written before takes the new token, as after a rejected draft."""
    made = world(run, chosen(run, lambda p: ((1, p), (3, 2 * p + 1), (1, 1))))
    backend = build(run, made.case)
    made.run(backend, writes_cache(run))
    again = redrawn(made)
    out, _ = again.run(backend, writes_cache(run))
    again.check(out, run=run)


@check(Kind.ATTENTION, "attention.write.separate", Level.HOSTILE)
def write_is_not_forward(run: Run) -> None:
    """forward does not change the cache, and reads the values that write stored."""
    if writes_cache(run):
        raise NotApplicable("forward stores the new tokens itself: writes_cache is declared")
    made = world(run, chosen(run, mixed))
    backend = build(run, made.case)
    query, key, value = made.new_tokens()
    with threads(1):
        plan = backend.plan(made.batch)
        backend.write(made.layer, key, value, made.cache, plan)
        before = made.cache_bits()
        out = torch.empty(
            len(query), made.case.num_heads, made.layer.head_size_v, dtype=query.dtype, device=query.device
        )
        for _ in range(2):
            backend.forward(made.layer, query, key, value, made.cache, plan, out, made.sinks)
            made.expect_cache(before, "forward changed the cache, and the descriptor does not declare writes_cache")


@check(Kind.ATTENTION, "attention.inputs.unchanged", Level.HOSTILE, cases=by_pair_and_layout)
def inputs_unchanged(run: Run) -> None:
    """Query, key, value, sinks and the batch's tensors are read only."""
    made = world(run, chosen(run, mixed, amplitude=6.0))
    made.run(build(run, made.case), writes_cache(run))


@check(Kind.ATTENTION, "attention.inputs.host", Level.HOSTILE)
def host_arrays_unchanged(run: Run) -> None:
    """plan does not change the batch's host arrays."""
    made = world(run, chosen(run, mixed))
    backend = build(run, made.case)
    arrays = (made.batch.query_start_loc_cpu, made.batch.seq_lens_cpu)
    before = [array.copy() for array in arrays]
    with threads(1):
        plan = backend.plan(made.batch)
    if any((array != old).any() for array, old in zip(arrays, before, strict=True)):
        raise Failed("plan changed query_start_loc_cpu or seq_lens_cpu")
    out, _ = made.step(backend, plan, writes_cache(run))
    made.check(out, run=run)
