"""Declared workspaces: as large as declared, of no meaning between steps."""

from __future__ import annotations

import torch
from attrs import evolve

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.attention_choice import chosen, device_of, examine, world
from slotline.testing.environments.attention_shapes import SHAPES

GUARD = 4096
"""Bytes on each side of the workspace."""


@check(Kind.ATTENTION, "attention.workspace.bytes", Level.CONTRACT, cost=0.05)
def declared(run: Run) -> None:
    """The workspace is a whole number of bytes that does not shrink with more requests, tokens or layers."""
    _refuse_none(run)
    context = chosen(run, ((1, 33),)).context(device_of(run.subject), layers=2)
    size = run.subject.capabilities.workspace(context)
    if type(size) is not int or size < 0:
        raise Failed(f"workspace gives {size!r:.80}, wanted a number of bytes, an int of at least 0")
    for name in ("max_requests", "max_tokens", "max_query_len", "max_model_len"):
        more = run.subject.capabilities.workspace(evolve(context, **{name: 2 * getattr(context, name)}))
        if more < size:
            raise Failed(f"workspace shrinks from {size} to {more} bytes when {name} is doubled")


@check(
    Kind.ATTENTION,
    "attention.workspace.garbage",
    Level.HOSTILE,
    cases=lambda _: [{"shape": shape} for shape in ("decode", "mixed")],
)
def garbage(run: Run) -> None:
    """What is in the workspace before a step does not matter, and no byte next to it is written."""
    _refuse_none(run)
    case = chosen(run, SHAPES[run["shape"]])
    context = run.subject.with_workspace(case.context(device_of(run.subject)))
    size = len(context.workspace)
    whole = torch.full((size + 2 * GUARD,), 0xA5, dtype=torch.uint8, device=context.device)
    workspace = whole[GUARD : GUARD + size]
    backend = run.subject.build(evolve(context, workspace=workspace))
    for value in (0xFF, 0x7F, 0x00):
        workspace.fill_(value)
        examine(run, world(run, case), backend)
    if bool((whole[:GUARD] != 0xA5).any() or (whole[GUARD + size :] != 0xA5).any()):
        raise Failed(f"bytes next to the workspace of {size} bytes were written")


def _refuse_none(run: Run) -> None:
    if run.subject.capabilities.workspace is None:
        raise NotApplicable("no workspace is declared")
