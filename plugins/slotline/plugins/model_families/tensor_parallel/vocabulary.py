"""Division of embeddings and the output projection by tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from slotline.plugins.model_families.tensor_parallel.parts import Taken, note
from slotline.plugins.model_families.tensor_parallel.work import Work

BY_LAYER = ("embed_tokens_per_layer",)
"""Children of a decoder with an embedding of each token for every layer (Gemma 3n)."""


def divide(work: Work, hf_model: Any) -> None:
    """Divide the embedding and the output projection by tokens, the same ones if they are tied.

    Numbers of tokens that the ranks do not divide are filled up with zeros.
    """
    embedding, head = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()
    names = {module: name for name, module in hf_model.named_modules()}
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    if isinstance(embedding, nn.Embedding) and (not tied or type(head) is nn.Linear):
        _embedding(work, names[embedding], embedding)
    for child in BY_LAYER:
        further = hf_model.base_model._modules.get(child)
        if isinstance(further, nn.Embedding):
            _embedding(work, names[further], further)
    if type(head) is not nn.Linear or head not in names:
        return
    size = head.weight.shape[0]
    part = -(-size // work.shard.size)
    place = partial(_padded, start=work.shard.rank * part, part=part)
    head.weight = embedding.weight if tied else nn.Parameter(place(head.weight), requires_grad=False)
    if head.bias is not None:
        head.bias = nn.Parameter(place(head.bias), requires_grad=False)
    head.out_features = part
    note(head, "weight", Taken(0, _places(work.shard.rank * part, part, size), size))
    work.joined.gathered[names[head]] = size


def _places(start: int, part: int, size: int) -> torch.Tensor:
    return torch.arange(min(start, size), min(start + part, size))


def _embedding(work: Work, name: str, embedding: nn.Embedding) -> None:
    size = embedding.weight.shape[0]
    part = -(-size // work.shard.size)
    start = work.shard.rank * part
    embedding.weight = nn.Parameter(_padded(embedding.weight, start, part), requires_grad=False)
    embedding.num_embeddings, embedding.padding_idx = part, None
    work.joined.embeddings[name] = (start, start + part)
    note(embedding, "weight", Taken(0, _places(start, part, size), size))


def _padded(weight: Any, start: int, part: int) -> Any:
    """Return rows `start` .. `start + part - 1` of a weight, zeros behind its end."""
    piece = weight.detach()[start : start + part]
    if piece.shape[0] < part:
        piece = nn.functional.pad(piece, (0, 0) * (piece.dim() - 1) + (0, part - piece.shape[0]))
    return piece.clone()
