"""Edges of attention that a backend takes over: the same numbers as those that the suite computes itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import evolve

from slotline.registry.contracts.attention_edges import EDGES, EXPANSION, GATE, NORM, ROTARY, ROUNDED
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.attention_choice import build, chosen, dtype_pairs, layouts, longest_query, refusal
from slotline.testing.environments.attention_edges import EdgedStep, EdgeForm
from slotline.testing.environments.attention_shapes import SHAPES, Requests, mixed
from slotline.testing.subject import Subject

LATENT = {"edges": EXPANSION, "mla": True}
SEVERAL = (NORM, ROTARY, GATE, ROUNDED)
"""Edges that a call may have together."""


def declared(subject: Subject) -> tuple[str, ...]:
    """Return the declared edges of plain layers.

    Raises:
        NotApplicable: if there are none.
    """
    names = tuple(name for name in SEVERAL if refusal(subject, {"edges": name}) is None)
    if not names:
        raise NotApplicable("no edges of plain layers are declared")
    return names


def by_form(subject: Subject) -> Iterable[Case]:
    """Return each declared edge alone, rotations of two forms, scales of three, and all edges together.

    And all of a step of single tokens, which a backend may compute in another way.
    """
    names = declared(subject)
    forms: list[dict[str, Any]] = [{"edges": (name,)} for name in names]
    if ROTARY in names:
        forms += [{"edges": (ROTARY,), "partial": True}, {"edges": (ROTARY,), "partial": True, "whole": False}]
    if ROUNDED in names:
        forms += [{"edges": (ROUNDED,), "groups": 0}, {"edges": (ROUNDED,), "groups": 2}]
    forms += [{"edges": names, "partial": True}] if len(names) > 1 else []
    return [*forms, {"edges": names, "batch": "decode"}]


def by_pair(subject: Subject) -> Iterable[Case]:
    """Return all declared edges together, with each pair of dtypes, and layouts and batches in turn."""
    names, orders, batches = declared(subject), layouts(subject), tuple(SHAPES)
    return [
        {
            "edges": names,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "layout": orders[i % len(orders)],
            "batch": batches[i % len(batches)],
        }
        for i, (dtype, kv_dtype) in enumerate(dtype_pairs(subject))
        if refusal(subject, {"dtypes": (dtype, kv_dtype)}) is None
    ]


def form_of(case: Case) -> EdgeForm:
    """Return the form that a check's case asks for."""
    return EdgeForm(case["edges"], case.get("partial", False), case.get("whole", True), case.get("groups", 1))


def batch_of(case: Case) -> Callable[[int], Requests]:
    """Return the batch that a check's case asks for."""
    return SHAPES[case.get("batch", "mixed")]


@check(Kind.ATTENTION, "attention.edges.names", Level.CONTRACT, cost=0.02)
def names(run: Run) -> None:
    """The contract knows every declared edge. An expansion is declared beside latents alone."""
    offer = run.subject.capabilities.edges.values
    if offer is None:
        raise Failed("edges accepts any name; declare those of slotline.registry.contracts.attention_edges")
    if unknown := sorted(offer - set(EDGES)):
        raise Failed(f"edges has {', '.join(map(repr, unknown))}; the contract knows {', '.join(EDGES)}")
    if EXPANSION in offer and refusal(run.subject, {"mla": True}) is not None:
        raise Failed(f"edges has {EXPANSION!r} without mla")
    if not offer:
        raise NotApplicable("no edges are declared")


@check(Kind.ATTENTION, "attention.edges", Level.NUMERICS, cases=by_form, profile="mixed")
def each(run: Run) -> None:
    """Heads are normed, rotated, stored, and outputs gated and rounded, as if the model had done it."""
    case = chosen(run, batch_of(run.case)).friendly()
    EdgedStep(run, case, form_of(run.case)).prove(build(run, case))


@check(Kind.ATTENTION, "attention.edges.batches", Level.NUMERICS, cases=by_pair, profile="mixed")
def batches(run: Run) -> None:
    """All edges together, with each pair of dtypes."""
    if run["batch"] != "decode" and longest_query(run.subject, {}) < 2:
        raise NotApplicable("requests have one query token")
    case = chosen(run, SHAPES[run["batch"]]).friendly()
    EdgedStep(run, case, form_of(run.case)).prove(build(run, case))


@check(
    Kind.ATTENTION,
    "attention.edges.expansion",
    Level.NUMERICS,
    needs=LATENT,
    cases=lambda _: [{"mla": True, "batch": name} for name in SHAPES],
)
def expansion(run: Run) -> None:
    """Latents are expanded by the backend: for whole prompts, after a prefix, in decode and in verification."""
    if run["batch"] != "decode" and longest_query(run.subject, {"mla": True}) < 2:
        raise NotApplicable("requests have one query token")
    case = chosen(run, SHAPES[run["batch"]]).friendly()
    EdgedStep(run, case, EdgeForm((EXPANSION,))).prove(build(run, case))


@check(Kind.ATTENTION, "attention.edges.hostile", Level.HOSTILE, cases=by_form)
def hostile(run: Run) -> None:
    """Strided inputs are only read, and what is in padded rows, other blocks and gaps does not matter."""
    case = evolve(chosen(run, batch_of(run.case)), merged=True)
    EdgedStep(run, case, form_of(run.case)).prove(build(run, case))


@check(Kind.ATTENTION, "attention.edges.hostile_expansion", Level.HOSTILE, needs=LATENT)
def hostile_expansion(run: Run) -> None:
    """The same for latents that the backend expands."""
    case = evolve(chosen(run, mixed, mla=True), merged=True)
    EdgedStep(run, case, EdgeForm((EXPANSION,))).prove(build(run, case))


@check(Kind.ATTENTION, "attention.edges.turns", Level.STATEFUL, cases=by_form)
def turns(run: Run) -> None:
    """Calls with edges and calls without take turns, and neither changes the other."""
    case = chosen(run, batch_of(run.case)).friendly()
    backend = build(run, case)
    found = []
    for _ in range(3):
        step = EdgedStep(run, case, form_of(run.case))
        step.prove(backend)  # without edges first, then with them
        found.append(step.attend(backend)[0])
    if any(not torch.equal(found[0], other) for other in found[1:]):
        raise Failed("a call with edges gives another output after calls without and with them")
