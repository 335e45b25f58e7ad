"""Keys that an index picks (lightning indexer of DeepSeek-V3.2, arXiv 2512.02556, section 2.1), in float32."""

from __future__ import annotations

import torch


def picked(
    query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor, visible: torch.Tensor, most: int
) -> torch.Tensor:
    """Return which keys each query attends to, [B, q, L] bool: of those visible, the `most` with the highest scores.

    Of equal scores the first keys are taken.

    Args:
        query: [B, q, heads, size] of the index.
        keys: [B, L, size] of the index.
        weight: [B, q, heads] float32, factors on the products of each head that are above 0.
        visible: [B, q, L] bool, the keys that a query may attend to.
        most: number of keys.
    """
    if keys.shape[1] <= most:
        return visible
    scores = torch.zeros(visible.shape, dtype=torch.float32, device=query.device)
    columns = keys.float().transpose(1, 2)  # [B, size, L]
    for head in range(query.shape[2]):  # one after another: a tensor of all heads would be as many times larger
        products = torch.matmul(query[:, :, head].float(), columns)  # [B, q, L]
        scores += products.relu_() * weight[:, :, head, None]
    scores.masked_fill_(~visible, -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :most]
    return torch.zeros_like(visible).scatter_(-1, best, True) & visible
