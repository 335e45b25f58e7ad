"""Sizes behind powers of two, where tiles, masks and tables end: prompts, rows, slots, windows and heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from slotline.conformance.state.problems import by_kind, by_recurrent_kind, friendly, hostile, problem_of
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, Run, check
from slotline.testing.subject import Subject

SIZES = "sizes"
PROMPTS = ((65, 96, 129, 192, 257), (513, 768), (1025,), (2049,))
"""Tokens of the prompts of a batch."""
ROWS = (17, 33, 65, 130)
WIDTHS = (5, 6, 8, 9)

WIDE: Mapping[str, tuple[Mapping[str, Any], ...]] = MappingProxyType(
    {
        "short_conv": ({"channels": 257}, {"channels": 520}),
        "mamba1": ({"channels": 130, "state_size": 17}, {"channels": 24, "state_size": 33}),
        "mamba2": (
            {"num_heads": 17, "head_size": 33, "num_groups": 1, "state_size": 65},
            {"num_heads": 2, "head_size": 65, "num_groups": 2, "state_size": 129},
        ),
        "gated_delta": (
            {"num_k_heads": 3, "num_v_heads": 24, "head_size_k": 65, "head_size_v": 33},
            {"num_k_heads": 1, "num_v_heads": 1, "head_size_k": 129, "head_size_v": 130},
        ),
    }
)
"""Facts of wide layers by kind, behind the tiles of one to 256 channels, heads and columns."""


def by_prompts(subject: Subject) -> Iterator[Case]:
    """Return the prompts of each kind, of convolutions the short ones."""
    recurrent = {case["kind"] for case in by_recurrent_kind(subject)}
    for case in by_kind(subject):
        for prompts in PROMPTS if case["kind"] in recurrent else PROMPTS[:3]:
            yield {**case, "prompts": "+".join(map(str, prompts))}


@check(Kind.STATE, "state.sizes.prompts", Level.NUMERICS, cases=by_prompts, profile=SIZES, cost=0.8)
def prompts(run: Run) -> None:
    """Prompts of up to thousands of tokens, remembered over all of their chunks, and one token after each."""
    session = friendly(run, problem_of(run, memory=400.0))
    counts = [int(count) for count in run["prompts"].split("+")]
    requests = [session.request(slot) for slot in range(len(counts))]
    session.feed(list(zip(requests, counts, strict=True)))
    session.step([(request, 1) for request in requests])


@check(
    Kind.STATE,
    "state.sizes.rows",
    Level.HOSTILE,
    cases=lambda subject: ({**case, "rows": rows} for case in by_kind(subject) for rows in ROWS),
    profile=SIZES,
    cost=0.3,
)
def rows(run: Run) -> None:
    """Many requests in one batch, and slots with high numbers: prompts of one token, single tokens, and padding."""
    count = run["rows"]
    session = hostile(run, num_slots=count + 3)
    requests = [session.request(slot) for slot in run.rng.sample(range(count + 3), count)]
    session.step([(request, 1) for request in requests])
    run.rng.shuffle(requests)
    session.step([*((request, 1) for request in requests[:-2]), (None, 0), (None, 0)])
    session.step([(requests[-1], 1), *((request, 1) for request in requests[: count // 2])])


@check(
    Kind.STATE,
    "state.sizes.widths",
    Level.NUMERICS,
    cases=lambda subject: (
        {**case, "width": width} for case in by_kind(subject) if case["kind"] == "short_conv" for width in WIDTHS
    ),
    profile=SIZES,
    cost=0.05,
)
def widths(run: Run) -> None:
    """Convolutions over more than four tokens: prompts shorter and longer than the window, and tokens after them."""
    session = friendly(run, problem_of(run, width=run["width"]))
    requests = [session.request(slot) for slot in range(4)]
    session.feed([(request, (1, 3, run["width"], 40)[request.slot]) for request in requests])
    for _ in range(run["width"]):
        session.step([(request, 1) for request in requests])


def by_wide(subject: Subject) -> Iterator[Case]:
    """Return the wide layers of each kind that the contract has."""
    for case in by_kind(subject):
        for number in range(len(WIDE.get(case["kind"], ()))):
            yield {**case, "wide": number}


@check(Kind.STATE, "state.sizes.wide", Level.NUMERICS, cases=by_wide, profile=SIZES, cost=0.3)
def wide(run: Run) -> None:
    """Layers with more heads, channels and columns than a tile has, in prompts and single tokens."""
    session = friendly(run, problem_of(run, **WIDE[run["kind"]][run["wide"]]))
    first, second = session.request(0), session.request(1)
    session.feed([(first, 37), (second, 5)])
    session.step([(first, 1), (second, 1)])
