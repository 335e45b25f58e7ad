"""Recurrences of mamba1, mamba2 and gated_delta for many requests at a time, in float32.

Each has `pieces`, which computes the operands of the recurrence from a layer's inputs (one row per token, and a row of
zeros does not change the state), `step` for one token of each request, and `chunk` for a chunk of each. R is the number
of requests, Q the tokens of a chunk.

Sources: the state-space dual form of a chunk, Dao and Gu, arXiv 2405.21060, section 6, the selective scan, Gu and Dao,
arXiv 2312.00752, section 3, the chunked delta rule as a triangular system, Yang and others, arXiv 2412.06464, section
3.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from slotline.backends.torch_state.batches import Tokens
from slotline.registry.contracts.state import StateLayer, kind_of

Facts = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Pieces = tuple[Tensor, ...]


class Recurrence(Protocol):
    """Interface of every kind."""

    def pieces(self, facts: Facts, inputs: Tensors) -> Pieces:
        """Return the operands of the recurrence, [num_tokens, ...] float32 each, from `inputs` of the same tokens."""
        ...

    def step(self, facts: Facts, inputs: Tensors, pieces: Pieces, state: Tensor) -> tuple[Tensor, Tensor]:
        """Advance by one token of each request and return outputs [R, ...] of `pieces` [R, ...].

        `state` [R, *shape] is changed in place.
        """
        ...

    def chunk(self, facts: Facts, inputs: Tensors, pieces: Pieces, state: Tensor) -> tuple[Tensor, Tensor]:
        """Advance by a chunk with `pieces` [R, Q, ...] and outputs [R, Q, ...]. `state` may be changed in place."""
        ...


def time_step(facts: Facts, inputs: Tensors) -> Tensor:
    """Return dt with its bias, made positive, clamped: [num_tokens, ...] float32."""
    dt = inputs["dt"].float()
    if "dt_bias" in inputs:
        dt = dt + inputs["dt_bias"]
    if facts["dt_softplus"]:
        dt = F.softplus(dt)
    limit = facts.get("dt_limit")
    return dt if limit is None else dt.clamp(*limit)


def decays(logarithm: Tensor) -> tuple[Tensor, Tensor]:
    """Return, from log decays [..., Q], their running sum and the decay from token s to t [..., t, s], 0 for s > t."""
    total = logarithm.cumsum(-1)
    above = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    return total, (total[..., :, None] - total[..., None, :]).masked_fill(above, float("-inf")).exp()


class Mamba1:
    """Selective scan with a decay for each channel and state: token by token, since no matrix product does it."""

    def pieces(self, facts: Facts, inputs: Tensors) -> Pieces:
        """Return d [.., D], d * x [.., D], B and C [.., N]."""
        d = time_step(facts, inputs)
        return d, d * inputs["x"].float(), inputs["B"].float(), inputs["C"].float()

    def step(self, facts: Facts, inputs: Tensors, pieces: Pieces, state: Tensor) -> tuple[Tensor, Tensor]:
        d, x, b, c = pieces
        state.mul_(torch.exp(d[:, :, None] * inputs["A"])).addcmul_(x[:, :, None], b[:, None, :])
        return (state * c[:, None, :]).sum(-1), state  # twice as fast as a matrix product with one column

    def chunk(self, facts: Facts, inputs: Tensors, pieces: Pieces, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for token in zip(*(piece.unbind(1) for piece in pieces), strict=True):
            output, state = self.step(facts, inputs, token, state)
            outputs.append(output)
        return torch.stack(outputs, dim=1), state


class Mamba2:
    """Selective scan with one decay for each head. Heads [H] are groups [G] x heads of a group."""

    def pieces(self, facts: Facts, inputs: Tensors) -> Pieces:
        """Return d * A [.., H], d * x [.., H, P], B and C [.., G, N]."""
        d = time_step(facts, inputs)
        return d * inputs["A"], d[..., None] * inputs["x"].float(), inputs["B"].float(), inputs["C"].float()

    def step(self, facts: Facts, inputs: Tensors, pieces: Pieces, state: Tensor) -> tuple[Tensor, Tensor]:
        decay, x, b, c = pieces
        each = facts["num_heads"] // facts["num_groups"]
        b, c = b.repeat_interleave(each, 1), c.repeat_interleave(each, 1)  # [R, H, N]
        state.mul_(decay.exp()[..., None, None]).addcmul_(x[..., None], b[:, :, None, :])
        return (state * c[:, :, None, :]).sum(-1), state

    def chunk(self, facts: Facts, inputs: Tensors, pieces: Pieces, state: Tensor) -> tuple[Tensor, Tensor]:
        groups = facts["num_groups"]
        logarithm, x = pieces[0].transpose(1, 2), pieces[1].transpose(1, 2)  # [R, H, Q], [R, H, Q, P]
        b, c = pieces[2].transpose(1, 2)[:, :, None], pieces[3].transpose(1, 2)[:, :, None]  # [R, G, 1, Q, N]
        total, decay = decays(logarithm)
        grouped = (groups, -1)
        x, decay, before = x.unflatten(1, grouped), decay.unflatten(1, grouped), state.unflatten(1, grouped)
        from_start = total.exp().unflatten(1, grouped)[..., None]
        to_end = (total[..., -1:] - total).exp().unflatten(1, grouped)[..., None]
        output = (c @ b.mT * decay) @ x + from_start * (c @ before.mT)  # [R, G, H / G, Q, P]
        added = ((to_end * x).mT @ b).flatten(1, 2)  # [R, H, P, N]
        return output.flatten(1, 2).transpose(1, 2), torch.addcmul(added, total[..., -1].exp()[..., None, None], state)


class GatedDelta:
    """Gated delta rule. Value heads share key heads."""

    def pieces(self, facts: Facts, inputs: Tensors) -> Pieces:
        """Return g, beta [.., Hv], q, k [.., Hv, K], v [.., Hv, V]."""
        q, k = inputs["q"].float(), inputs["k"].float()
        if facts["qk_l2norm"]:
            q, k = (value * torch.rsqrt(value.square().sum(-1, keepdim=True) + 1e-6) for value in (q, k))
        each = facts["num_v_heads"] // facts["num_k_heads"]
        q, k = (q * facts["scale"]).repeat_interleave(each, -2), k.repeat_interleave(each, -2)
        return inputs["g"].float(), inputs["beta"].float(), q, k, inputs["v"].float()

    def step(self, facts: Facts, inputs: Tensors, pieces: Pieces, state: Tensor) -> tuple[Tensor, Tensor]:
        g, beta, q, k, v = pieces
        state.mul_(g.exp()[..., None, None])
        update = beta[..., None] * (v - (k[..., None] * state).sum(-2))  # [R, Hv, V]
        state.addcmul_(k[..., None], update[..., None, :])
        return (q[..., None] * state).sum(-2), state

    def chunk(self, facts: Facts, inputs: Tensors, pieces: Pieces, state: Tensor) -> tuple[Tensor, Tensor]:
        g, beta, q, k, v = (piece.transpose(1, 2) for piece in pieces)  # [R, Hv, Q, ...]
        total, decay = decays(g)
        from_start, beta = total.exp()[..., None], beta[..., None]
        # Token t's correction depends on those before it in the chunk: (1 + system) update = wanted.
        system = (beta * (k @ k.mT) * decay).tril(-1)
        wanted = beta * (v - from_start * (k @ state))
        update = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        output = from_start * (q @ state) + (q @ k.mT * decay) @ update
        to_end = (total[..., -1:] - total).exp()[..., None]
        state = torch.addcmul((to_end * k).mT @ update, total[..., -1].exp()[..., None, None], state)
        return output.transpose(1, 2), state


class KimiDelta:
    """Gated delta rule with a decay for each channel of the keys (arXiv 2510.26692, section 3)."""

    def pieces(self, facts: Facts, inputs: Tensors) -> Pieces:
        """Return g [.., H, K], beta [.., H], q, k [.., H, K], v [.., H, V]."""
        q, k = (inputs[name].float() for name in ("q", "k"))
        q, k = (value * torch.rsqrt(value.square().sum(-1, keepdim=True) + 1e-6) for value in (q, k))
        return inputs["g"].float(), inputs["beta"].float(), q * facts["scale"], k, inputs["v"].float()

    def step(self, facts: Facts, inputs: Tensors, pieces: Pieces, state: Tensor) -> tuple[Tensor, Tensor]:
        g, beta, q, k, v = pieces
        state.mul_(g.exp()[..., None])
        update = beta[..., None] * (v - (k[..., None] * state).sum(-2))  # [R, H, V]
        state.addcmul_(k[..., None], update[..., None, :])
        return (q[..., None] * state).sum(-2), state

    def chunk(self, facts: Facts, inputs: Tensors, pieces: Pieces, state: Tensor) -> tuple[Tensor, Tensor]:
        g, beta, q, k, v = (piece.transpose(1, 2) for piece in pieces)  # [R, H, Q, ...]
        total = g.cumsum(-2)
        above = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu(1)
        between = total[..., :, None, :] - total[..., None, :, :]  # [R, H, t, s, K]
        decayed = between.masked_fill(above[..., None], float("-inf")).exp() * k[..., None, :, :]
        from_start = total.exp()
        system = (beta[..., None] * (k[..., None, :] * decayed).sum(-1)).tril(-1)
        wanted = beta[..., None] * (v - (from_start * k) @ state)
        update = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        output = (from_start * q) @ state + (q[..., None, :] * decayed).sum(-1) @ update
        to_end = (total[..., -1:, :] - total).exp()
        state = torch.addcmul((to_end * k).mT @ update, from_start[..., -1, :, None], state)
        return output.transpose(1, 2), state


RECURRENCES: Mapping[str, Recurrence] = MappingProxyType(
    {"mamba1": Mamba1(), "mamba2": Mamba2(), "gated_delta": GatedDelta(), "kda": KimiDelta()}
)


def own_inputs(layer: StateLayer, inputs: Tensors, tokens: Tokens) -> dict[str, Tensor]:
    """Return a layer's inputs of some tokens, and all parameters."""
    of_tokens = {*kind_of(layer).token_inputs, "z"}
    return {name: tokens.take(value) if name in of_tokens else value for name, value in inputs.items()}
