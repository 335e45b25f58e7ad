"""What processed logits must look like, and what the greedy token is."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.contracts import Companion


def form_fault(before: torch.Tensor, after: Any) -> str | None:
    """What is wrong with the form of processed logits, or None.

    Args:
        before: [n, vocab_size] float32, as they were given.
        after: what came back.
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
    """The first (entry, token) that was at minus infinity and is not any more."""
    wrong = (before.isneginf() & ~after.isneginf()).nonzero().tolist()
    return (int(wrong[0][0]), int(wrong[0][1])) if wrong else None


def greedy_tokens(logits: torch.Tensor) -> set[int]:
    """The tokens of the highest logit of one row, [vocab_size]; several where they tie."""
    return set((logits == logits.max()).nonzero().flatten().tolist())


def greedy_change(before: torch.Tensor, after: torch.Tensor) -> str | None:
    """Why the greedy token of a row may be another than it was, or None.

    Where several tie the first is taken, so that one must stay among the highest, and none may join them.
    """
    old, new = greedy_tokens(before), greedy_tokens(after)
    if min(old) not in new:
        return f"the greedy token was {min(old)} and is {min(new)}"
    if not new <= old:
        return f"token {min(new - old)} has become as high as the greedy token {min(old)}"
    return None


def difference(expected: torch.Tensor, found: torch.Tensor) -> str | None:
    """The first logit in which two rows [vocab_size] differ, bit for bit but for the sign of zero, or None."""
    wrong = (expected != found).nonzero().flatten().tolist()
    if not wrong:
        return None
    token = wrong[0]
    return (
        f"the logit of token {token} is {float(found[token]):.9g}, wanted {float(expected[token]):.9g} "
        f"({len(wrong)} of {len(expected)} differ)"
    )


def floor_fault(before: torch.Tensor, after: torch.Tensor, temperature: float, floor: float) -> str | None:
    """Where a row [vocab_size] is not what a floor makes of it at a temperature, or None.

    Tokens whose distance from the bound is within the rounding of float32 may go either way.
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
    """What is wrong with a companion, or None."""
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
