"""What processed logits must look like, and what the greedy token is."""

from __future__ import annotations

from typing import Any

import torch


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
