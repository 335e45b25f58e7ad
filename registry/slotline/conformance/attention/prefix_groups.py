"""Prefixes that groups of requests share, each read once for its group: the same results as without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slotline.conformance.attention.cascade import add_padded_requests, by_feature, examine_padded
from slotline.registry.contracts.prefix_groups import MAX_LEVELS, MAX_SEGMENTS
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.attention import World
from slotline.testing.environments.attention_choice import (
    build,
    chosen,
    examine,
    layouts,
    need_query,
    refusal,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_shapes import Requests
from slotline.testing.environments.attention_variants import (
    Segment,
    plant,
    prefix_groups,
    segment_arrays,
    share_prefix,
    share_segments,
)
from slotline.testing.subject import Subject

GROUPS = {"cascade": True}
Form = Callable[[int], tuple[tuple[int, ...], Sequence[Segment]]]
"""From the block size to the shared keys of each request and the segments."""


def apart(p: int) -> tuple[tuple[int, ...], Sequence[Segment]]:
    """Return two groups whose requests alternate, with prefixes of unequal length, and two requests in none."""
    return (2 * p, 5 * p, 0, 2 * p, 5 * p, 2 * p, 0), [Segment((0, 3, 5), 0, 2 * p), Segment((1, 4), 0, 5 * p)]


def many(p: int) -> tuple[tuple[int, ...], Sequence[Segment]]:
    """Return four pairs, one with a long prefix."""
    lengths = (p, 2 * p, 40 * p, 3 * p)
    return lengths * 2, [Segment((i, i + 4), 0, length) for i, length in enumerate(lengths)]


def levels(p: int) -> tuple[tuple[int, ...], Sequence[Segment]]:
    """Return a prefix of six requests, of which two and three share more, and a request in no group."""
    shared = (4 * p, 3 * p, 3 * p, 4 * p, 2 * p, 3 * p, 0)
    inner = [Segment((0, 3), 2 * p, 4 * p, 1), Segment((1, 2, 5), 2 * p, 3 * p, 1)]
    return shared, [Segment((0, 1, 2, 3, 4, 5), 0, 2 * p), *inner]


FORMS: dict[str, Form] = {"apart": apart, "many": many, "levels": levels}


def forms(subject: Subject) -> list[str]:
    """Return the forms that a backend declares to serve.

    Raises:
        NotApplicable: if there are none.
    """
    declared = subject.capabilities.cascade_prefixes
    if declared == "one":
        raise NotApplicable('cascade_prefixes is "one"')
    return list(FORMS) if declared == "levels" else ["apart", "many"]


def by_form(subject: Subject) -> Iterable[Case]:
    """Return forms, kinds of batch, and layouts in turn."""
    orders, rows = layouts(subject), [(form, batch) for form in forms(subject) for batch in ("decode", "mixed")]
    return [{"form": form, "batch": batch, "layout": orders[i % len(orders)]} for i, (form, batch) in enumerate(rows)]


def by_form_and_feature(subject: Subject) -> Iterable[Case]:
    """Return the last form that is served with features that merging can get wrong."""
    last = forms(subject)[-1]
    return [{"form": last, **fields} for fields in by_feature(subject)]


def one_case(subject: Subject) -> Iterable[Case]:
    """Return one case of the last form that is served."""
    return [{"form": forms(subject)[-1]}]


def requests_of(form: str, batch: str, p: int) -> Requests:
    """Return the requests of a form: each has the keys that it shares, and some of its own, at the edges of pages."""
    shared, _ = FORMS[form](p)
    own = {"decode": ((1, 1), (1, 2), (1, p)), "mixed": ((1, 1), (4, 4), (p + 2, p + 2), (5, 2 * p), (1, p + 3))}[batch]
    return tuple((own[i % len(own)][0], length + own[i % len(own)][1]) for i, length in enumerate(shared))


def shared(run: Run, form: str, batch: str, **fields: Any) -> World:
    """Return a world whose requests share and announce the segments of a form."""
    if batch != "decode":
        need_query(run.subject, 5)
    case = chosen(run, lambda p: requests_of(form, batch, p), **fields)
    made = world(run, case)
    share_segments(made, FORMS[form](case.block_size)[1])
    return made


@check(Kind.ATTENTION, "attention.prefix_groups", Level.NUMERICS, needs=GROUPS, cases=by_form)
def prefixes(run: Run) -> None:
    """Groups with prefixes of their own, scattered over the batch and at several levels, give the same as without."""
    examine(run, shared(run, run["form"], run["batch"]))


@check(Kind.ATTENTION, "attention.prefix_groups.features", Level.NUMERICS, needs=GROUPS, cases=by_form_and_feature)
def features(run: Run) -> None:
    """The parts are joined by LSE: a sink counts once, a cap and ALiBi hold in all, large scores do not overflow."""
    for batch in ("decode", "mixed"):
        if batch == "mixed" and refusal(run.subject, {"query_len": 5}) is not None:
            continue
        examine(run, shared(run, run["form"], batch))


@check(
    Kind.ATTENTION,
    "attention.prefix_groups.lse",
    Level.NUMERICS,
    needs={**GROUPS, "lse": True},
    cases=by_form_and_feature,
)
def lse(run: Run) -> None:
    """The LSE is that of all parts together."""
    made = shared(run, run["form"], "decode")
    out, found = made.run(build(run, made.case), writes_cache(run))
    if found is None:
        raise Failed("forward returned no LSE, and the descriptor declares one")
    made.check(out, found, run, base=run.subject.capabilities.lse_base)


def by_place(subject: Subject) -> Iterable[Case]:
    """Return the places of a needle in each form."""
    places = ("first", "last of a segment", "first own", "own")
    return [{"form": form, "at": place} for form in forms(subject) for place in places]


@check(Kind.ATTENTION, "attention.prefix_groups.needle", Level.NUMERICS, needs=GROUPS, cases=by_place)
def needle(run: Run) -> None:
    """One key decides the output: the first of all, a segment's last, the first after all segments, the query's own."""
    case = chosen(run, lambda p: requests_of(run["form"], "decode", p))
    made, (lengths, segments) = world(run, case), FORMS[run["form"]](case.block_size)
    last = segments[-1]
    for request, (_, total) in enumerate(case.requests):
        if run["at"] in ("first own", "own"):
            plant(made, request, lengths[request] if run["at"] == "first own" else total - 1, run["at"])
    if run["at"] in ("first", "last of a segment"):
        lender = last.requests[0]
        plant(made, lender, 0 if run["at"] == "first" else last.end - 1, run["at"])
        for request in last.requests[1:]:
            made.queries[request][:] = made.queries[lender][-1:]
        if run["at"] == "first" and last.level:  # it is in a segment that other requests share too
            outer = segments[0]
            made.keys[outer.requests[0]][0], made.values[outer.requests[0]][0] = (
                made.keys[lender][0],
                made.values[lender][0],
            )
            made.store(outer.requests[0])
    share_segments(made, segments)
    examine(run, made)


@check(Kind.ATTENTION, "attention.prefix_groups.again", Level.STATEFUL, needs=GROUPS, cases=one_case)
def again(run: Run) -> None:
    """Steps with other groups, with one prefix of all, and with none follow each other on one object."""
    backend = build(run, chosen(run, lambda p: requests_of(run["form"], "decode", p)))
    for form in ("apart", run["form"], "", "many", "one", "apart"):
        case = chosen(run, lambda p, f=form: requests_of(f if f in FORMS else "apart", "decode", p))  # type: ignore[misc]
        if form == "one":
            case = chosen(run, lambda p: tuple((1, 2 * p + own) for own in (1, 2, p + 1)))
        made = world(run, case)
        if form == "one":
            share_prefix(made, 2 * case.block_size, announced=True)
        elif form:
            share_segments(made, FORMS[form](case.block_size)[1])
        examine(run, made, backend)


@check(Kind.ATTENTION, "attention.prefix_groups.padded", Level.HOSTILE, needs=GROUPS, cases=one_case)
def padded(run: Run) -> None:
    """Padded requests, and segments without tokens as captured shapes have, give finite rows and affect nothing."""
    made = shared(run, run["form"], "decode")
    add_padded_requests(made)
    segments = FORMS[run["form"]](made.case.block_size)[1]
    deepest = MAX_LEVELS if run.subject.capabilities.cascade_prefixes == "levels" else 1
    arrays = segment_arrays(segments, made.batch.query_start_loc_cpu, (MAX_SEGMENTS, deepest))
    made.batch.prefix_groups = prefix_groups(arrays, deepest, made.device)
    examine_padded(run, made)
