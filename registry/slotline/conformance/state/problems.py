"""Layers that the checks run on, from a plugin's declarations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any

from slotline.conformance.state.session import Session
from slotline.registry.contracts.state import STATE_KINDS
from slotline.testing.check import Case, NotApplicable, Run
from slotline.testing.environments.state import Problem, make_problem, surround
from slotline.testing.subject import Subject

NO_LIMIT = (0.0, float("inf"))
DTYPES = ("float32", "bfloat16", "float16")

SIZES: Mapping[str, tuple[Mapping[str, Any], ...]] = MappingProxyType(
    {
        "short_conv": (
            {"channels": 6, "width": 4, "activation": "silu"},
            {"channels": 33, "width": 2, "activation": "silu"},
            {"channels": 16, "width": 3, "activation": "none"},
        ),
        "mamba1": (
            {"channels": 6, "state_size": 5, "dt_softplus": True},
            {"channels": 16, "state_size": 16, "dt_softplus": True},
            {"channels": 33, "state_size": 1, "dt_softplus": True},
        ),
        "mamba2": (
            {"num_heads": 6, "head_size": 5, "num_groups": 2, "state_size": 12},
            {"num_heads": 4, "head_size": 16, "num_groups": 1, "state_size": 16},
            {"num_heads": 3, "head_size": 8, "num_groups": 3, "state_size": 7},
        ),
        "gated_delta": (
            {"num_k_heads": 2, "num_v_heads": 6, "head_size_k": 12, "head_size_v": 5},
            {"num_k_heads": 2, "num_v_heads": 2, "head_size_k": 16, "head_size_v": 16},
            {"num_k_heads": 1, "num_v_heads": 4, "head_size_k": 8, "head_size_v": 24},
        ),
    }
)
"""Sizes of each kind; the first has more than one group, more than one head in each, and no power of two."""

_USUAL: Mapping[str, Mapping[str, Any]] = {
    "mamba2": {"dt_softplus": True, "dt_limit": NO_LIMIT},
    "gated_delta": {"qk_l2norm": True},
}


def declared_kinds(subject: Subject) -> tuple[str, ...]:
    """Return kinds of layers that the plugin declares, and that the contract has or the plugin defines."""
    own = (name for name, kind in subject.capabilities.own_kinds.items() if kind.step and kind.draw and kind.sizes)
    return tuple(kind for kind in (*STATE_KINDS, *own) if subject.capabilities.state_kinds.refusal(kind) is None)


def sizes_of(subject: Subject, kind: str) -> tuple[Mapping[str, Any], ...]:
    """Return the facts of the layers of a kind that the checks run on."""
    own = subject.capabilities.own_kinds.get(kind)
    return SIZES[kind] if own is None else own.sizes


def declared_dtypes(subject: Subject) -> tuple[tuple[str, str], ...]:
    """Return dtype pairs that the plugin declares and the suite knows, the most accurate first.

    Raises:
        NotApplicable: if there is none.
    """
    found = tuple(pair for pair in product(DTYPES, DTYPES) if subject.capabilities.dtypes.refusal(pair) is None)
    if not found:
        raise NotApplicable(f"no dtype pair among {', '.join(DTYPES)} is declared")
    return found


def by_kind(subject: Subject) -> Iterator[Case]:
    """Return a case for each kind, with the most accurate dtype pair."""
    return ({"kind": kind} for kind in declared_kinds(subject) if declared_dtypes(subject))


def by_recurrent_kind(subject: Subject) -> Iterator[Case]:
    """Return the cases of `by_kind`, without convolutions."""
    kinds = {**STATE_KINDS, **subject.capabilities.own_kinds}
    return (case for case in by_kind(subject) if kinds[case["kind"]].recurrent)


def by_kind_size_and_dtype(subject: Subject) -> Iterator[Case]:
    """Return each size and each dtype pair of each kind at least once. All combinations if exhaustive."""
    pairs = declared_dtypes(subject)
    for kind in declared_kinds(subject):
        for size, (pair_number, pair) in product(range(len(sizes_of(subject, kind))), enumerate(pairs)):
            if subject.exhaustive or size == 0 or pair_number == 0:
                yield {"kind": kind, "size": size, "dtypes": "/".join(pair)}


def problem_of(run: Run, kind: str | None = None, *, index: int = 0, memory: float = 8.0, **facts: Any) -> Problem:
    """Return the layer of a case: ``kind``, ``size`` and ``dtypes``, each with a default."""
    kind = kind or run["kind"]
    optional = bool(facts.pop("optional", True))
    own = run.subject.capabilities.own_kinds.get(kind)
    sizes = sizes_of(run.subject, kind)[run.case.get("size", 0)]
    pair = tuple(run.case["dtypes"].split("/")) if "dtypes" in run.case else declared_dtypes(run.subject)[0]
    known = {**sizes, **_USUAL.get(kind, {}), **facts}
    if kind == "gated_delta":
        known.setdefault("scale", known["head_size_k"] ** -0.5)
    return make_problem(
        kind,
        (pair[0], pair[1]),
        known,
        optional=optional,
        memory=memory,
        seed=run.seed % 9973,
        index=index,
        own_kind=own,
    )


def friendly(run: Run, *problems: Problem, **options: Any) -> Session:
    """Return a session with contiguous tensors and benign surroundings."""
    return Session(run, surround(run.subject, problems or (problem_of(run),), hostile=False, **options))


def hostile(run: Run, *problems: Problem, **options: Any) -> Session:
    """Return a session in which a wrong read meets NaN and a wrong write is detected."""
    return Session(run, surround(run.subject, problems or (problem_of(run),), hostile=True, **options))


def most_tokens(subject: Subject) -> int:
    """Return the most new tokens of a request that the plugin accepts in one batch, as far as the checks go."""
    limit = subject.capabilities.query_len.limit
    return 512 if limit is None else min(int(limit), 512)


def up_to(subject: Subject, counts: Iterable[int]) -> list[int]:
    """Return those of some numbers of tokens that fit into one batch."""
    return [count for count in counts if count <= most_tokens(subject)]
