"""Candidates for the nodes of a tree, each with the confidence of its path."""

from __future__ import annotations

from typing import NamedTuple

import torch

FIRST_RANK, RANK_FACTOR = -0.4, -1.3
"""Logarithms of what the likeliest token is worth in a fixed tree, and of what each further rank is worth less."""


class Candidates(NamedTuple):
    """Nodes of the trees of n requests, level by level, as many of each request.

    `token_ids` and `parents` are [n, m] int64, with -1 for the parent of a first token. `values` [n, m] float32 are the
    logarithms of their confidence, which no child exceeds.
    """

    token_ids: torch.Tensor
    values: torch.Tensor
    parents: torch.Tensor

    def with_children(self, token_ids: torch.Tensor, values: torch.Tensor, parents: torch.Tensor) -> Candidates:
        """Return the candidates with a level more, [n, k] each."""
        more = (token_ids, values, parents)
        return Candidates(*(torch.cat(pair, 1) for pair in zip(self, more, strict=True)))

    def best(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and the parents of the `count` nodes of the highest confidence, [n, count] int64 each.

        The likeliest path comes first, so that its keys and values lie where they stay. The others follow by falling
        confidence.
        """
        order = self.values.sort(dim=1, descending=True, stable=True).indices[
            :, :count
        ]  # parents before their children
        place = torch.full_like(self.parents, -1).scatter(
            1, order, torch.arange(order.shape[1]).to(order).expand_as(order)
        )
        parents = _moved(self.parents.gather(1, order), place)
        first = _first_path(parents)
        again = (~first).to(torch.int8).sort(dim=1, stable=True).indices
        rank = torch.empty_like(again).scatter_(1, again, torch.arange(again.shape[1]).to(again).expand_as(again))
        return self.token_ids.gather(1, order.gather(1, again)), _moved(parents.gather(1, again), rank)


def _moved(parents: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the new places [n, m] of parents [n, m], -1 where there is none."""
    return torch.where(parents < 0, parents, places.gather(1, parents.clamp(min=0)))


def _first_path(parents: torch.Tensor) -> torch.Tensor:
    """Return a mask [n, m] of the nodes of the chain of first children."""
    found = torch.zeros_like(parents, dtype=torch.bool)
    last = torch.full_like(parents[:, :1], -1)
    for _ in range(parents.shape[1]):
        child = parents == last
        goes_on, first = child.any(1, keepdim=True), child.to(torch.int8).argmax(1, keepdim=True)
        found |= torch.zeros_like(found).scatter(1, first, goes_on)
        last = torch.where(goes_on, first, -2)
    return found
