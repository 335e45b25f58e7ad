"""Checks of the form of processed logits, and the greedy token."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.contracts import Companion

ROUNDING = 4e-6
"""Relative error of a logit that float32 may give, some thirty roundings."""


def form_fault(before: torch.Tensor, after: Any) -> str | None:
    """Return the fault in the form of processed logits, or None.

    Args:
        before: [n, vocab_size] float32, the input.
        after: the output.
    """
    if not isinstance(after, torch.Tensor):
        return f"apply returned {type(after).__name__}, wanted the logits"
    if after.shape != before.shape:
        return f"apply returned logits of shape {tuple(after.shape)}, wanted {tuple(before.shape)}"
    if after.dtype is not torch.float32 or after.device != before.device:
        return f"apply returned {after.dtype} on {after.device}, wanted torch.float32 on {before.device}"
    wrong = after.isnan().nonzero().tolist()
    if wrong:
        entry, token = wrong[0]
        return f"entry {entry}: the logit of token {token} was {float(before[entry, token]):.6g} and became NaN"
    return None


def lifted_ban(before: torch.Tensor, after: torch.Tensor) -> tuple[int, int] | None:
    """Return the first (entry, token) that was minus infinity and is not any more."""
    wrong = (before.isneginf() & ~after.isneginf()).nonzero().tolist()
    return (int(wrong[0][0]), int(wrong[0][1])) if wrong else None


def greedy_tokens(logits: torch.Tensor) -> set[int]:
    """Return the tokens with the highest logit of one row [vocab_size], several if they tie."""
    return set((logits == logits.max()).nonzero().flatten().tolist())


def greedy_change(before: torch.Tensor, after: torch.Tensor) -> str | None:
    """Return the reason why the greedy token of a row may have changed, or None.

    If several tokens tie, the first one is taken. It must stay among the highest, and no token may join them.
    """
    old, new = greedy_tokens(before), greedy_tokens(after)
    if min(old) not in new:
        return f"the greedy token was {min(old)} and is {min(new)}"
    if not new <= old:
        return f"token {min(new - old)} has become as high as the greedy token {min(old)}"
    return None


def difference(expected: torch.Tensor, found: torch.Tensor) -> str | None:
    """Return the first logit in which two rows [vocab_size] differ (bitwise, except the sign of zero), or None."""
    wrong = (expected != found).nonzero().flatten().tolist()
    if not wrong:
        return None
    token = wrong[0]
    return (
        f"the logit of token {token} is {float(found[token]):.9g}, wanted {float(expected[token]):.9g} "
        f"({len(wrong)} of {len(expected)} differ)"
    )


def value_fault(wanted: list[float], found: list[float]) -> str | None:
    """Return the first logit that is not the wanted one, but for a few roundings of float32, or None."""
    for token, (right, logit) in enumerate(zip(wanted, found, strict=True)):
        near = right == logit or abs(right - logit) <= ROUNDING * max(1.0, abs(right))
        if not near:
            return f"the logit of token {token} is {logit:.9g}, its oracle says {right:.9g}"
    return None


def floor_fault(before: torch.Tensor, after: torch.Tensor, temperature: float, floor: float) -> str | None:
    """Return the place at which a row [vocab_size] differs from the result of a floor at a temperature, or None.

    Tokens within the float32 rounding error of the bound may be kept or dropped.
    """
    scaled = before.double() / temperature
    bound = scaled.max() + floor
    room = 1e-6 * (1 + scaled.abs().nan_to_num(posinf=0, neginf=0).max())
    kept = ~after.isneginf()
    wrong = torch.where(kept, scaled < bound - room, scaled > bound + room).nonzero().flatten().tolist()
    if wrong:
        token, below = wrong[0], float(scaled.max() - scaled[wrong[0]])
        return (
            f"token {token}, {below:.6g} below the best at the temperature, was {'kept' if kept[token] else 'banned'}"
        )
    changed = (kept & (after != before)).nonzero().flatten().tolist()
    if changed:
        token = changed[0]
        return f"the logit of token {token}, which is kept, was {float(before[token])} and is {float(after[token])}"
    return None


def companion_fault(found: Any, vocab_size: int) -> str | None:
    """Return the fault in a companion, or None."""
    if not isinstance(found, Companion):
        return f"companion returned {type(found).__name__}, wanted a Companion or None"
    if not (isinstance(found.name, str) and found.name and isinstance(found.asked, str) and found.asked):
        return f"name and asked must name parameters: {found}"
    if isinstance(found.prompt, str):
        return None if found.prompt else "the companion's prompt is an empty text"
    tokens = list(found.prompt)
    if not tokens or not all(isinstance(token, int) and 0 <= token < vocab_size for token in tokens):
        return f"the companion's prompt must be one or more token ids below {vocab_size}: {tokens}"
    return None
