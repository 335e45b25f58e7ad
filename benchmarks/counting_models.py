"""Models of any shape that count: behind token t comes t + 1, by a margin that no rounding reaches.

Every layer is computed in full, but `o_proj` and `down_proj` are so small that the last hidden state is the embedding
of the last token, and row t + 1 of the output projection is the embedding of token t. A drafter of another shape, made
in the same way and with some embeddings wrong, then has as many drafts accepted as is wanted, in every batch shape.
"""

from __future__ import annotations

from typing import Any

import torch

SMALL = 1e-3
"""What projections back into the residual stream are scaled by."""
CYCLE = 840
"""Divisible by 1 to 8: a text that begins at a multiple of it begins a round of drafts, whatever number is right."""


@torch.no_grad()
def make_counting(model: Any, right: int | None = None) -> Any:
    """Make a transformers decoder of Llama's names count, in place.

    Args:
        right: of a drafter, how many drafts stand before one falls: it is wrong about every token that is divisible by
            `right` + 1. None for none that fall.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding.data_ptr() == head.data_ptr():
        raise ValueError("the output projection is the embedding: a model that counts needs tie_word_embeddings=false")
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(SMALL)
    embedding.normal_()
    head.copy_(embedding.roll(1, 0)).mul_(0.02)
    if right is not None:
        mislead(embedding, right)
    return model


@torch.no_grad()
def mislead(embedding: torch.Tensor, right: int) -> None:
    """Make a model that counts wrong about every token that `right` + 1 divides: those before get other embeddings."""
    embedding[right :: right + 1].normal_()


def prompts(requests: int, length: int, vocab_size: int, room: int) -> list[list[int]]:
    """Random prompts; the text behind each begins with a multiple of `CYCLE` and ends before the vocabulary does."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(1, (vocab_size - room) // CYCLE, (requests,), generator=generator) * CYCLE
    made = torch.randint(1, vocab_size, (requests, length), generator=generator)
    made[:, -1] = starts - 1
    found: list[list[int]] = made.tolist()
    return found
