"""Models of any shape that count: behind token t comes t + 1, by a margin that no rounding reaches.

Every layer is computed in full, but `o_proj` and `down_proj` are so small that the last hidden state is the embedding
of the last token, and row t + 1 of the output projection is the embedding of token t. A drafter of another shape, made
in the same way and with some embeddings wrong, then has as many drafts accepted as is wanted, in every batch shape.

An EAGLE-3 head counts, too: each token attends to itself, and so finds its own embedding.
"""

from __future__ import annotations

from typing import Any

import torch

SMALL = 1e-3
"""What projections back into the residual stream are scaled by."""
SELF = 2.0
"""What queries and keys of a counting head are scaled by: with heads of 128, 45 for a token and itself."""
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
def make_head_count(head: Any, embedding: torch.Tensor) -> None:
    """Make an EAGLE-3 head of a target with that embedding [vocab_size, hidden_size] count, in place.

    Keys and values are parts of the embedding, and queries those of their keys: a token's product with itself is far
    larger than any other. Its values, the beginning of its embedding, are what the output projection knows; off them
    comes the hidden state that they are added to, or a step would know the tokens before as well as its own.
    """
    attention, layer = head.midlayer.self_attn, head.midlayer
    for weight in (*layer.parameters(), head.fc.weight):
        weight.normal_(std=1e-4) if weight.ndim == 2 else weight.fill_(1.0)
    known, size = attention.k_proj.out_features, attention.head_size
    group = attention.q_proj.out_features // known
    identity = torch.eye(known, device=embedding.device, dtype=embedding.dtype)
    attention.k_proj.weight[:, :known] = SELF * identity
    attention.v_proj.weight[:, :known] = identity
    hidden = embedding.shape[1]
    attention.v_proj.weight[:, hidden : hidden + known] = -((known / hidden) ** 0.5) * identity
    by_head = identity.view(-1, 1, size, known).expand(-1, group, -1, -1)
    attention.q_proj.weight[:, :known] = SELF * by_head.reshape(-1, known)
    first = torch.arange(known, device=embedding.device)
    attention.o_proj.weight[first, first // size * group * size + first % size] = 1.0
    head.norm.weight.fill_(1.0)
    count_to(head.lm_head.weight, embedding, known)


@torch.no_grad()
def count_to(lm_head: torch.Tensor, embedding: torch.Tensor, known: int, right: int | None = None) -> None:
    """Let a head [draft_vocab_size, hidden_size] know t + 1 behind t by `known` elements of t's embedding, in place.

    Args:
        right: how many drafts stand before one falls; None for none that fall.
    """
    lm_head.zero_()
    lm_head[:, :known] = 0.02 * embedding.roll(1, 0)[: len(lm_head), :known]
    if right is not None:
        lm_head[:: right + 1, :known].normal_(std=0.02)


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
