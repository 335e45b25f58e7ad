"""Pieces of a step that take turns in one thread: while tokens of one travel among ranks, another one computes.

Each piece is a greenlet. It pauses where it waits for an exchange, and the next one goes on. The order is the same on
all ranks, and with it that of their exchanges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from slotline.plugins.model_families.binding import AttendHolder
from slotline.plugins.model_families.tensor_parallel.expert_routing import OwnTokens

Piece = Callable[[], torch.Tensor | None]


def in_turns(pieces: Sequence[Piece], forms: Sequence[OwnTokens], holder: AttendHolder) -> list[torch.Tensor | None]:
    """Return what each piece of a forward pass returns.

    Args:
        pieces: in the order of their tokens, so that a later one finds the keys of those before.
        forms: of the model's mixtures, where a piece pauses.
        holder: of the model, whose state is kept for each piece.
    """
    found: list[torch.Tensor | None] = [None] * len(pieces)

    def run(number: int) -> None:
        found[number] = pieces[number]()

    line = deque((greenlet(partial(run, number)), holder.state()) for number in range(len(pieces)))
    outside = holder.state()
    for form in forms:
        form.pause = _pause
    try:
        while line:
            piece, state = line.popleft()
            holder.restore(state)
            piece.switch()
            if not piece.dead:
                line.append((piece, holder.state()))
    finally:
        for form in forms:
            form.pause = None
        for piece, state in line:  # after an error of another one
            holder.restore(state)
            piece.throw()
        holder.restore(outside)
    return found


def _pause() -> None:
    """Let the next piece go on."""
    outer: Any = getcurrent().parent
    outer.switch()
