"""Edges of attention in float64, by the formulas of `slotline.registry.contracts.attention_edges`."""

from __future__ import annotations

import torch

from slotline.registry.contracts.attention_edges import AttentionEdges, HeadNorm


def turned(states: torch.Tensor, norm: HeadNorm | None, edges: AttentionEdges) -> torch.Tensor:
    """Return states [n, heads, size] normed, then rotated, in float64."""
    states = states.double()
    if norm is not None:
        root = (states.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        states = states / root * (norm.offset + norm.weight.double())
    if edges.cos is None or edges.sin is None:
        return states
    cos, sin, half = edges.cos.double(), edges.sin.double(), edges.rotary_size // 2
    turned = states.clone()
    for i in range(half):
        j, second = i + half, cos.shape[1] - half + i  # of the pair's second number
        a, b = states[..., i], states[..., j]
        turned[..., i] = a * cos[:, i, None] - b * sin[:, i, None]
        turned[..., j] = b * cos[:, second, None] + a * sin[:, second, None]
    return turned


def absorbed(query: torch.Tensor, expansion: torch.Tensor, plain: int) -> torch.Tensor:
    """Return queries [n, H, plain + rotary] for latents, [n, H, rank + rotary], in float64."""
    moved = torch.einsum("nhp,hpr->nhr", query[..., :plain].double(), expansion[:, :plain].double())
    return torch.cat((moved, query[..., plain:].double()), dim=-1)


def expanded(out: torch.Tensor, expansion: torch.Tensor, plain: int) -> torch.Tensor:
    """Return outputs [n, H, value size] of sums of latents [n, H, rank], in float64."""
    return torch.einsum("nhr,hvr->nhv", out.double(), expansion[:, plain:].double())


def gated(out: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Return an output [n, H, Dv] times the sigmoid of its gate, in float64."""
    return out.double() if gate is None else out.double() * torch.sigmoid(gate.double())


def scales_of(out: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the scales [n, groups] of a rounded output, in float64."""
    return out.reshape(len(out), groups, -1).abs().amax(2) / 127
