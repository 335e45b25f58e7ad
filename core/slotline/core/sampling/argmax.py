"""The likeliest token of each row of logits."""

from __future__ import annotations

import torch

from slotline.kernels.triton_support import has_triton


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest entries of each row [n, vocab_size], as `argmax` gives it: [n] int64.

    Few rows are cut into parts on a GPU. Torch gives each row to one multiprocessor and leaves the others idle.
    NaN counts as infinity.
    """
    if logits.is_cuda and has_triton():
        from slotline.core.sampling.triton_argmax import likeliest_triton

        return likeliest_triton(logits)
    return logits.argmax(-1)
