"""Triton kernels for bitmask bans and for marking rows without a valid token, and places that tokens are kept at."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from slotline.backends.cuda.triton_kernels import ban_tokens, mark_rows

_BLOCK_WORDS = 64
_BLOCK_LOGITS = 8192
_MARK_WARPS = 16


class Kept(NamedTuple):
    """Further places for tokens [n]: a table, at the places `stand_ins` [n] int64, and the host."""

    stand_ins: torch.Tensor
    table: torch.Tensor  # int64
    host: torch.Tensor  # [n] int64, memory that the device can address


def keeping(kept: Kept | None, tokens: torch.Tensor) -> tuple[Any, ...]:
    """Return the kept places as kernel arguments. `tokens` int64 fill the arguments that the kernel does not touch."""
    return (tokens, tokens, tokens, 0) if kept is None else (*kept, 1)


def ban_by_bitmask(logits: torch.Tensor, words: torch.Tensor, places: torch.Tensor) -> None:
    """Write minus infinity into contiguous logits [n, vocab_size] float32 where a bit is 0.

    Args:
        words: [num_rows, ceil(vocab_size / 32)] int32, bit i of word j for token 32 * j + i.
        places: [num_rows] int32, distinct rows of the logits.
    """
    vocab_size, num_words = logits.shape[1], words.shape[1]
    grid = (len(words), triton.cdiv(num_words, _BLOCK_WORDS))
    ban_tokens[grid](logits, words, places, vocab_size, num_words, block=_BLOCK_WORDS)


def mark_unusable(
    logits: torch.Tensor,
    raw: torch.Tensor,
    touched: torch.Tensor | None,
    tokens: torch.Tensor,
    *,
    not_finite: int,
    none_left: int,
    all_greedy: bool = False,
) -> torch.Tensor:
    """Return tokens [n] int64 with a mark for each row without a usable logit.

    A row is marked if it holds NaN or infinity where `raw` does not, or if it is minus infinity throughout.

    Args:
        logits, raw: [n, vocab_size] float32.
        touched: [n] bool, the rows to look at. None means all.
        all_greedy: whether each token is the place of its row's largest logit, or of NaN. Only that logit is looked at
            then.
    """
    marked = torch.empty_like(tokens)
    mark_rows[(len(tokens),)](
        logits.contiguous(),
        raw.contiguous(),
        touched,
        tokens.contiguous(),
        marked,
        logits.shape[1],
        not_finite,
        none_left,
        every=touched is None,
        greedy=all_greedy,
        block=min(_BLOCK_LOGITS, triton.next_power_of_2(logits.shape[1])),
        num_warps=_MARK_WARPS,
    )
    return marked
