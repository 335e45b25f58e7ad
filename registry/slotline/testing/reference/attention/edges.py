"""Attention with all edges, written for clarity."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.contracts.attention import AttentionLayer, KVCache
from slotline.registry.contracts.attention_edges import AttentionEdges, HeadNorm
from slotline.testing.reference.attention.backend import EagerAttention, Plan


class EdgedAttention(EagerAttention):
    """The textbook formula, with what a model may leave to a backend. Mutants change one of its steps."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        edges: AttentionEdges | None = None,
    ) -> torch.Tensor | None:
        """Compute attention, and the edges of a call that has some."""
        if edges is None:
            return super().forward(layer, query, key, value, cache, plan, out, sinks)
        plain = query.shape[-1] - (layer.head_size - layer.head_size_v)  # of a query that is not absorbed
        if edges.expansion is None:
            query, key = self.query_of(query, edges), self.key_of(key, edges)
        else:
            query = self.absorb(query, edges.expansion, plain)
        self.keep(layer, key, value, cache, plan)
        whole = query.new_empty(*out.shape[:2], layer.head_size_v)
        lse = super().forward(layer, query, key, value, cache, plan, whole, sinks)
        found = whole.float()
        if edges.expansion is not None:
            found = self.expand_output(found, edges.expansion, plain)
        if edges.gate is not None:
            found = self.gated(found, edges.gate.float())
        found[plan.starts[-1] :] = 0
        self.give(found, edges, out)
        return lse

    def query_of(self, query: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        """Return the query normed and rotated."""
        return self.turn(query, edges.query_norm, edges)

    def key_of(self, key: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        """Return the key normed and rotated."""
        return self.turn(key, edges.key_norm, edges)

    def turn(self, states: torch.Tensor, norm: HeadNorm | None, edges: AttentionEdges) -> torch.Tensor:
        """Return states [n, heads, size] normed, then rotated, rounded once."""
        found = states.float() if norm is None else self.norm(states.float(), norm)
        return (found if edges.cos is None else self.rotate(found, edges)).to(states.dtype)

    def norm(self, states: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
        """Return normed heads [n, heads, size]."""
        return states * self.reciprocal(states, norm.eps) * self.weight(norm)

    def reciprocal(self, states: torch.Tensor, eps: float) -> torch.Tensor:
        """Return one over the root of the mean square of each head, [n, heads, 1]."""
        return torch.rsqrt(states.square().mean(-1, keepdim=True) + eps)

    def weight(self, norm: HeadNorm) -> torch.Tensor:
        """Return the factors of normed numbers, [size]."""
        return norm.offset + norm.weight.float()

    def rotate(self, states: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        """Return rotated heads [n, heads, size]."""
        half = edges.rotary_size // 2
        cos, sin = self.angles(edges)
        first, second = states[..., :half], states[..., half : 2 * half]
        turned = (first * cos[0] - second * sin[0], second * cos[1] + first * sin[1])
        return torch.cat((*turned, states[..., 2 * half :]), dim=-1)

    def angles(self, edges: AttentionEdges) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return cosines and sines, each of the first and of the second numbers of pairs, [n, 1, rotary_size / 2]."""
        half = edges.rotary_size // 2
        both: Any = (edges.cos, edges.sin)
        cos, sin = ([part.float()[:, None, :half], part.float()[:, None, -half:]] for part in both)
        return cos, sin

    def keep(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        """Store the step's keys and values."""
        self.write(layer, key, value, cache, plan)

    def absorb(self, query: torch.Tensor, expansion: torch.Tensor, plain: int) -> torch.Tensor:
        """Return queries for latents of those for expanded keys."""
        moved = torch.einsum("nhp,hpr->nhr", query[..., :plain].float(), expansion[:, :plain].float())
        return torch.cat((moved, query[..., plain:].float()), dim=-1)

    def expand_output(self, out: torch.Tensor, expansion: torch.Tensor, plain: int) -> torch.Tensor:
        """Return outputs of values of sums of latents."""
        return torch.einsum("nhr,hvr->nhv", out, expansion[:, plain:].float())

    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the gated output."""
        return out * torch.sigmoid(gate)

    def give(self, found: torch.Tensor, edges: AttentionEdges, out: torch.Tensor) -> None:
        """Write the output, rounded to eight bits if the call asks for it."""
        if edges.scales is None:
            out.copy_(found)
            return
        groups = found.reshape(len(found), edges.scales.shape[1], -1)
        edges.scales.copy_(self.scales_of(groups))
        out.copy_(self.codes(groups, edges.scales[..., None].clamp_min(1e-30)).view(out.shape))

    def scales_of(self, groups: torch.Tensor) -> torch.Tensor:
        """Return the scales [n, groups] of numbers [n, groups, size]."""
        return groups.abs().amax(2) / 127

    def codes(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the rounded output."""
        return (groups / scales).round()
