"""Banning tokens by bitmasks on a GPU: what is allowed is read, everything is written once."""

from __future__ import annotations

import torch
import triton

from slotline.core.sampling.triton_kernels import ban_tokens

_BLOCK_WORDS = 64


def ban_by_bitmask(logits: torch.Tensor, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocab_size] float32 with minus infinity where a bit is 0; the input is not changed.

    Args:
        words: [num_rows, ceil(vocab_size / 32)] int32, bit i of word j for token 32 * j + i.
        places: [num_rows] int32, distinct rows of the logits.
    """
    vocab_size, num_words = logits.shape[1], words.shape[1]
    logits = logits.contiguous()
    result = torch.empty_like(logits) if len(words) == len(logits) else logits.clone()
    grid = (len(words), triton.cdiv(num_words, _BLOCK_WORDS))
    ban_tokens[grid](logits, result, words, places, vocab_size, num_words, block=_BLOCK_WORDS)
    return result
