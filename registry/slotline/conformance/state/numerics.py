"""L1: correct values in benign surroundings."""

from __future__ import annotations

from collections.abc import Iterator

from slotline.conformance.state.problems import (
    NO_LIMIT,
    by_kind,
    by_kind_size_and_dtype,
    by_recurrent_kind,
    declared_kinds,
    friendly,
    problem_of,
)
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, Run, check
from slotline.testing.environments.state import with_unknown_names
from slotline.testing.subject import Subject


@check(Kind.STATE, "state.values.prefill", Level.NUMERICS, cases=by_kind_size_and_dtype, profile="prefill", cost=0.02)
def prefill(run: Run) -> None:
    """Outputs and state of one prompt, for every declared kind and dtype pair, in sizes that are no powers of two."""
    session = friendly(run)
    session.feed([(session.request(0), 37)])


@check(Kind.STATE, "state.values.decode", Level.NUMERICS, cases=by_kind_size_and_dtype, profile="decode", cost=0.05)
def decode(run: Run) -> None:
    """One token at a time after prompts of different lengths."""
    session = friendly(run)
    requests = [session.request(slot) for slot in range(3)]
    session.feed([(request, 5 + 2 * request.slot) for request in requests])
    for _ in range(5):
        session.step([(request, 1) for request in requests])


@check(
    Kind.STATE, "state.values.mixed", Level.NUMERICS, cases=by_kind, needs={"query_len": 9}, profile="mixed", cost=0.07
)
def mixed(run: Run) -> None:
    """Prompts, further pieces of prompts and single tokens in one batch."""
    session = friendly(run)
    old, middle = session.request(0), session.request(1)
    session.step([(old, 7), (middle, 4)])
    session.step([(old, 1), (middle, 6), (session.request(2), 9), (session.request(3), 1)])
    session.step([(session.request(4), 2), (old, 1), (middle, 1)])


@check(Kind.STATE, "state.values.short_prompts", Level.NUMERICS, cases=by_kind, profile="prefill", cost=0.06)
def short_prompts(run: Run) -> None:
    """Prompts of one to five tokens, shorter than a convolution too, each followed by single tokens."""
    session = friendly(run)
    requests = [session.request(slot) for slot in range(5)]
    session.feed([(request, 1 + request.slot) for request in requests])
    for _ in range(3):
        session.step([(request, 1) for request in requests])


_VARIANTS = {
    "short_conv": ({"optional": False}, {"activation": "none"}),
    "mamba1": ({"optional": False}, {"dt_softplus": False}),
    "mamba2": ({"optional": False}, {"dt_softplus": False, "dt_limit": NO_LIMIT}, {"dt_limit": (0.9, 1.4)}),
    "gated_delta": ({"scale": 0.7}, {"qk_l2norm": False, "scale": 0.1}),
}


def _variants(subject: Subject) -> Iterator[Case]:
    for case in by_kind(subject):
        for number in range(len(_VARIANTS.get(case["kind"], ()))):
            yield {**case, "variant": number}


@check(Kind.STATE, "state.values.facts", Level.NUMERICS, cases=_variants, cost=0.08)
def facts(run: Run) -> None:
    """Other facts of a layer are honoured: no optional inputs, no activation, bare or clamped time steps, scales."""
    variant = _VARIANTS[run["kind"]][run["variant"]]
    session = friendly(run, problem_of(run, **variant))
    first, second = session.request(0), session.request(1)
    session.feed([(first, 11), (second, 3)])
    session.step([(first, 1), (second, 1)])


@check(Kind.STATE, "state.values.long_memory", Level.NUMERICS, cases=by_recurrent_kind, profile="decode", cost=0.2)
def long_memory(run: Run) -> None:
    """A state that forgets slowly is kept in its declared dtype over many steps."""
    session = friendly(run, problem_of(run, memory=2000.0))
    request = session.request(0)
    session.feed([(request, 30)])
    for _ in range(50):
        session.step([(request, 1)])


@check(
    Kind.STATE,
    "state.values.long_prompt",
    Level.NUMERICS,
    cases=by_recurrent_kind,
    needs={"query_len": 150},
    profile="prefill",
    cost=0.2,
)
def long_prompt(run: Run) -> None:
    """A prompt of several chunks, remembered across all of them, and one token after it."""
    session = friendly(run, problem_of(run, memory=100.0))
    request = session.request(0)
    session.step([(request, 150)])
    session.step([(request, 1)])


@check(Kind.STATE, "state.values.strong_decay", Level.NUMERICS, cases=by_recurrent_kind, profile="prefill", cost=0.25)
def strong_decay(run: Run) -> None:
    """A state that forgets within a token overflows and underflows nowhere."""
    session = friendly(run, problem_of(run, memory=0.02))
    request = session.request(0)
    session.feed([(request, 70)])
    session.step([(request, 1)])


@check(Kind.STATE, "state.values.layers", Level.NUMERICS, cases=by_kind, needs={"query_len": 3})
def layers(run: Run) -> None:
    """Layers of a group share a plan and nothing else: parameters and states are each layer's own."""
    kinds = [run["kind"], run["kind"], *(kind for kind in declared_kinds(run.subject) if kind != run["kind"])]
    session = friendly(run, *(problem_of(run, kind, index=index) for index, kind in enumerate(kinds[:3])))
    first, second = session.request(0), session.request(1)
    session.step([(first, 3), (second, 1)])
    session.step([(first, 1), (second, 2)])


@check(Kind.STATE, "state.unknown_names.ignored", Level.NUMERICS, cases=by_kind, cost=0.3)
def unknown_names(run: Run) -> None:
    """Facts and inputs that a later version may add are ignored."""
    session = friendly(run, with_unknown_names(problem_of(run)))
    session.feed([(session.request(0), 4)])
