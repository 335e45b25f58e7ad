"""Explanations are sound: for random offers and requests, reasons are complete, conflicts minimal, advice works."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from itertools import product
from typing import Any

from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from negotiation_cases import CPU, FULL, GPU, SLIDING, backend, explicit, layer, request, sliding, spec

from slotline.registry.capability import Align, Choice, Flag, GraphSupport, Level, Limit, Max, Range, Set
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import CODES, Asked, Candidate, Measured, MeasuredRun, Plan, PlanRequest, negotiate
from slotline.registry.negotiation.needs import Problem
from slotline.registry.negotiation.search import Search, captures, common_multiples, must_capture

NAMES = ("a", "b", "c")
RUN = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])

aligns = st.builds(
    Align,
    exact=st.lists(st.sampled_from((8, 12, 16, 32)), max_size=2, unique=True).map(tuple),
    multiple_of=st.sampled_from((None, None, 16, 24, 256)),
)
preferences = st.sampled_from((Align(), Align(), Align((8,)), Align(multiple_of=32), Align((24, 64))))
pairs = st.sets(
    st.sampled_from((("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"))), min_size=1
)
layouts = st.permutations(("NHD", "HND")).flatmap(lambda order: st.sampled_from((order, order[:1]))).map(Choice)
levels = st.sampled_from(GraphSupport).map(Level)
limits = st.sampled_from(
    (
        (),
        (),
        (Limit(when="sliding_window", capability="graphs", offer=Level(GraphSupport.NEVER)),),
        (Limit(when="sliding_window", capability="kernel_block_sizes", offer=Align(multiple_of=32)),),
        (Limit(when="graphs", capability="query_len", offer=Max(1)),),
        (Limit(when="sliding_window", capability="preferred_block_sizes", offer=Align(multiple_of=48)),),
    )
)


@st.composite
def candidates(draw: st.DrawFn, name: str) -> Candidate:
    offer = backend(
        name,
        devices=Set(draw(st.sampled_from((("cpu",), ("cuda",), ("cpu", "cuda"))))),
        dtypes=Set(draw(pairs)),
        head_sizes=draw(st.sampled_from((Range(), Range(64, 128, 64), Range(80, 80)))),
        kernel_block_sizes=draw(aligns),
        preferred_block_sizes=draw(preferences),
        layouts=draw(layouts),
        query_len=Max(draw(st.sampled_from((None, 1, 4)))),
        sliding_window=Flag(draw(st.booleans())),
        graphs=draw(levels),
        limits=draw(limits),
        priority=draw(st.integers(0, 2)),
    )
    if draw(st.integers(0, 3)):  # three in four are limited in blocks, layouts and graphs alone, so that plans exist
        able = {"devices": Set(None), "dtypes": Set(None), "head_sizes": Range(), "query_len": Max()}
        capabilities = evolve(offer.capabilities, sliding_window=Flag(True), **able)
        return evolve(offer, capabilities=capabilities)
    trouble = draw(
        st.sampled_from((*[{}] * 6, {"load_error": "ImportError"}, {"probe_refusal": "no"}, {"contract": None}))
    )
    return evolve(offer, **trouble)


@st.composite
def runs(draw: st.DrawFn) -> MeasuredRun:
    name, modes = draw(st.sampled_from(NAMES)), ("none", "full_and_piecewise")
    return MeasuredRun(
        backends={"full": name, "sliding": name},
        versions={name: draw(st.sampled_from(("1.0", "1.0", "0.9")))},
        block_size=draw(st.sampled_from((16, 256))),
        graphs=draw(st.sampled_from(modes)),
        aim=draw(st.sampled_from(modes)),
        seconds=draw(st.sampled_from(({}, {"decode 1": 1e-3}, {"decode 1": 2e-3}))),
    )


measurements = st.builds(
    Measured,
    date=st.just("2026-11-21"),
    dtype=st.just("float32"),
    kv_dtype=st.just("float32"),
    aim=st.sampled_from(("none", "full_and_piecewise")),
    runs=st.lists(runs(), max_size=4).map(tuple),
)


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    size = draw(st.sampled_from((64, 64, 80)))
    kinds = draw(st.lists(st.sampled_from((layer, sliding)), min_size=1, max_size=3))
    layers = [make(index, head_size=size, head_size_v=size) for index, make in enumerate(kinds)]
    names = st.sampled_from((*NAMES * 3, "missing"))
    choice = draw(
        st.one_of(
            st.none(),
            names,
            st.lists(names, min_size=1, max_size=2, unique=True).map(tuple),
            st.dictionaries(st.sampled_from(("full", "sliding")), names, min_size=1),
        )
    )
    block = draw(st.sampled_from((None, None, 16, 20, 32)))
    mode = draw(st.sampled_from(("auto", "full", "piecewise", "none")))
    changes: dict[str, Any] = {
        "device": draw(st.sampled_from((CPU, GPU))),
        "dtype": Asked(draw(st.sampled_from(("float32", "bfloat16"))), "checkpoint", draw(st.booleans())),
        "dtype_fallbacks": draw(st.sampled_from(((), ("float32",)))),
        "kv_dtype": draw(st.sampled_from((Asked("auto"), Asked("auto"), explicit("fp8")))),
        "backend": Asked("auto") if choice is None else explicit(choice),
        "block_size": Asked("auto") if block is None else explicit(block),
        "layout": draw(st.sampled_from((Asked("auto"), Asked("auto"), explicit("HND")))),
        "graphs": Asked(mode, "default", mode != "auto"),
        "query_len": Asked(draw(st.sampled_from((1, 1, 5)))),
        "max_query_len": Asked(draw(st.sampled_from((1, 64)))),
        "prefix_caching": draw(st.sampled_from((Asked(True), explicit(True)))),
        "measured": draw(st.none() | measurements),
    }
    return request(*layers, **changes)


backends = st.tuples(*(candidates(name) for name in NAMES)).map(list)
specs = st.lists(
    st.sampled_from(
        (
            FULL,
            SLIDING,
            spec("whole", splittable=Flag(False)),
            spec("rigid", prefix_caching=Flag(False), block_sizes=Align((32,))),
        )
    ),
    min_size=1,
    max_size=2,
    unique_by=lambda item: item.name,
)


def outcome(asked: PlanRequest, offers: list[Candidate], kv: list[Candidate]) -> Plan | NegotiationError:
    try:
        return negotiate(asked, offers, kv)
    except NegotiationError as error:
        return error


def problem_of(asked: PlanRequest, offers: list[Candidate], kv: list[Candidate]) -> Problem:
    extra = [] if asked.backend.value == "auto" else [Candidate(name="missing")]
    return Problem(request=asked, attention=(*offers, *extra), kv_specs=tuple(kv))


@RUN
@given(requests(), backends, specs)
def test_every_candidate_that_lost_has_a_reason_with_a_known_code(
    asked: PlanRequest, offers: list[Candidate], kv: list[Candidate]
) -> None:
    result = outcome(asked, offers, kv)
    if isinstance(result, Plan):
        tables = [(group.rejected, {group.backend}) for group in result.groups]
    else:
        assert result.failure is not None
        tables = [(group.rejected, set()) for group in result.failure.groups if group.kind == "attention"]
    assert len(tables) == len(asked.groups)
    for rejected, chosen in tables:
        assert {item.name for item in rejected} | chosen >= set(NAMES)
        assert all(item.reasons and {reason.code for reason in item.reasons} <= set(CODES) for item in rejected)


@RUN
@given(requests(), backends, specs)
def test_a_plan_keeps_what_was_asked_and_what_each_backend_offers(
    asked: PlanRequest, offers: list[Candidate], kv: list[Candidate]
) -> None:
    plan = outcome(asked, offers, kv)
    if not isinstance(plan, Plan):
        return
    named = {item.name: item.capabilities for item in offers}
    if asked.block_size.explicit:
        assert plan.block_size == asked.block_size.value
    for group in plan.groups:
        offer = named[group.backend]
        names = asked.backend_for(group.layers[0].kv_kind).value
        assert not names or group.backend in names
        assert plan.block_size % group.kernel_block_size == 0
        assert offer.kernel_block_sizes.refusal(group.kernel_block_size) is None
        assert offer.layouts.refusal(group.layout) is None
        assert offer.dtypes.refusal((group.dtype, group.kv_dtype)) is None
        assert offer.query_len.refusal(asked.query_len.value) is None
        cache = plan.cache_group(group.cache_group)
        assert (cache.kernel_block_size, cache.layout) == (group.kernel_block_size, group.layout)
    assert (plan.dtype == asked.dtype.value) or not asked.dtype.explicit
    assert plan.digest == negotiate(asked, offers[::-1], kv[::-1]).digest


@RUN
@given(requests(), backends, specs)
def test_a_conflict_is_minimal_and_its_marks_are_true(
    asked: PlanRequest, offers: list[Candidate], kv: list[Candidate]
) -> None:
    from slotline.registry.negotiation.needs import asked_keys, inherent_keys

    result = outcome(asked, offers, kv)
    if isinstance(result, Plan):
        return
    assert result.failure is not None
    problem = problem_of(asked, offers, kv)
    everything = {*asked_keys(problem), *inherent_keys(problem)}
    members = [member.key for member in result.conflict]
    alone = problem.without(*(everything - set(members)))
    assert Search(alone).best() is None
    for member in result.conflict:
        assert Search(alone.without(member.key)).best() is not None
        assert member.sufficient == (Search(problem.without(member.key)).best() is not None)
    all_members = [member.key for group in (result.conflict, *result.failure.further) for member in group]
    if members and (not result.failure.further or result.failure.further[-1]):
        assert Search(problem.without(*all_members)).best() is not None
    else:
        assert Search(problem.without(*everything)).best() is None


@RUN
@given(requests(), backends, specs)
def test_advice_works_when_it_is_followed(asked: PlanRequest, offers: list[Candidate], kv: list[Candidate]) -> None:
    result = outcome(asked, offers, kv)
    if isinstance(result, Plan):
        for note in result.downgrades:
            for text in note.to_avoid:
                after = negotiate(followed(asked, text), offers, kv)
                assert (note.code, note.key) not in {(other.code, other.key) for other in after.downgrades}
        return
    assert result.failure is not None
    for text in result.failure.remedies:
        changed = asked
        for part in text.split(" together with "):
            changed = followed(changed, part)
        negotiate(changed, offers, kv)


def followed(asked: PlanRequest, text: str) -> PlanRequest:
    """The request after a line of advice was written into the file."""
    ((table, value),) = tomllib.loads(text).items()
    path = table
    while isinstance(value, Mapping) and path != "attention.backend" and not path.startswith("cache.kv_spec."):
        ((key, value),) = value.items()
        path = f"{path}.{key}"
    if path.startswith("cache.kv_spec."):
        return evolve(asked, kv_specs={**asked.kv_specs, path.rsplit(".", 1)[1]: explicit(value)})
    if path == "drafter.name":
        return evolve(asked, query_len=Asked(1))
    if path == "drafter.tokens":
        return evolve(asked, query_len=explicit(1 + value))
    field = {
        "attention.backend": "backend",
        "attention.layout": "layout",
        "cache.block_size": "block_size",
        "cache.dtype": "kv_dtype",
        "cache.prefix_caching": "prefix_caching",
        "dtype": "dtype",
        "graphs.mode": "graphs",
        "scheduler.max_batched_tokens": "max_query_len",
    }[path]
    changes: dict[str, Any] = {field: Asked(value) if value == "auto" else explicit(value)}
    return evolve(asked, **changes)


@settings(RUN, max_examples=80)
@given(requests(), backends, specs)
def test_the_search_agrees_with_trying_every_combination(
    asked: PlanRequest, offers: list[Candidate], kv: list[Candidate]
) -> None:
    problem = problem_of(evolve(asked, dtype_fallbacks=()), offers, kv)
    search = Search(problem)
    found = search.best()
    tried = list(every_combination(search))
    assert (found is None) == (not tried)
    if found is not None:
        assert found.cost[1:4] == min(tried)


def without_preferences(item: Candidate) -> Candidate:
    assert item.capabilities is not None
    limits = tuple(limit for limit in item.capabilities.limits if limit.capability != "preferred_block_sizes")
    return evolve(item, capabilities=evolve(item.capabilities, preferred_block_sizes=Align(), limits=limits))


@RUN
@given(requests(), backends, specs)
def test_preferred_block_sizes_change_the_block_size_alone_and_only_where_it_is_open(
    asked: PlanRequest, offers: list[Candidate], kv: list[Candidate]
) -> None:
    plan, plain = (outcome(asked, made, kv) for made in (offers, [without_preferences(item) for item in offers]))
    assert isinstance(plan, Plan) == isinstance(plain, Plan)
    if not isinstance(plan, Plan) or not isinstance(plain, Plan):
        return
    assert [group.backend for group in plan.groups] == [group.backend for group in plain.groups]
    assert [group.kv_spec for group in plan.groups] == [group.kv_spec for group in plain.groups]
    assert (plan.dtype, plan.kv_dtype, plan.graphs.resolved) == (plain.dtype, plain.kv_dtype, plain.graphs.resolved)
    assert {note.code for note in plan.downgrades} <= {note.code for note in plain.downgrades}
    noted = [note.resolved for note in plan.notes if note.code == "N305"]
    if plan.block_size != plain.block_size:
        assert asked.block_size.value == "auto"
        assert noted == [str(plan.block_size)]
    if len(plan.groups) == 1 and asked.block_size.value == "auto" and asked.measured is None:
        (group,) = plan.groups
        wished = wish(group, offers)
        if any(align.refusal(group.kernel_block_size) for align in wished):
            taken = next(item.capabilities for item in offers if item.name == group.backend).kernel_block_sizes
            held = next(item.capabilities for item in kv if item.name == group.kv_spec).block_sizes
            everything = (taken, held, *wished, *limited(group, offers))
            assert not any(all(align.refusal(size) is None for align in everything) for size in range(1, 1000))


def wish(group: Any, offers: list[Candidate]) -> tuple[Any, ...]:
    """What the chosen backend prefers for a group, by a reading of its descriptor that shares nothing with ours."""
    capabilities: Any = next(item.capabilities for item in offers if item.name == group.backend)
    return (capabilities.preferred_block_sizes, *limited(group, offers, "preferred_block_sizes"))


def limited(group: Any, offers: list[Candidate], name: str = "kernel_block_sizes") -> list[Any]:
    """What narrows an offer of block sizes where the group has a window."""
    capabilities: Any = next(item.capabilities for item in offers if item.name == group.backend)
    windowed = group.layers[0].window is not None
    return [limit.offer for limit in capabilities.limits if limit.capability == name and windowed]


def every_combination(search: Search) -> Any:
    """(preference, measured cost, graph loss) of every feasible combination, without the search's shortcuts."""
    problem = search.problem
    asked = problem.request
    table = search.offers((asked.dtype.value, asked.dtype.value if asked.cache_dtype == "auto" else asked.cache_dtype))
    sizes = [asked.block_size.value] if isinstance(asked.block_size.value, int) else range(1, 800)
    useful = set(common_multiples({16}, {8, 12, 16, 24, 32, 256}))
    for chosen in product(*([o for o in offers if not o.reasons] for offers in table)):
        if must_capture(problem) and not any(captures(offer) for offer in chosen):
            continue
        for held in product(*(search.specs(kind) for kind in problem.kinds)):
            specs = dict(zip(problem.kinds, held, strict=True))
            if any(works(asked, chosen, specs, size) for size in sizes if asked.block_size.explicit or size in useful):
                yield tuple(sum(getattr(o, name) for o in chosen) for name in ("preference", "measured", "loss"))


def works(asked: PlanRequest, chosen: Any, specs: dict[str, Candidate], size: int) -> bool:
    if any(item.capabilities.block_sizes.refusal(size) for item in specs.values()):
        return False
    tables: dict[Any, list[Any]] = {}
    for group, offer in zip(asked.groups, chosen, strict=True):
        item = specs[group.kv_kind]
        exact = item.capabilities.exact_kinds.refusal(group.kv_kind) is None
        tables.setdefault((item.name, group.layer.window if exact else None), []).append((offer, item))
    return all(
        any(
            size % kernel == 0 and all(offer.accepts_block(kernel) for offer, _ in own)
            for kernel in (range(1, size + 1) if own[0][1].capabilities.splittable.refusal(True) is None else (size,))
            if kernel == size or any(kernel in align.exact for offer, _ in own for align in offer.aligns)
        )
        and any(all(name in offer.layouts for offer, _ in own) for name in ("NHD", "HND"))
        for own in tables.values()
    )
