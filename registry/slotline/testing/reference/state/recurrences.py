"""Recurrences of all four kinds, one request at a time, in float32.

Each takes the layer's facts, the request's inputs and its initial state, and returns the outputs of its tokens and its
final state. Their steps are separate methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Facts = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
State = dict[str, Tensor]


class Recurrences:
    """Arithmetic of every kind. Subclasses may compute it in another order."""

    def short_conv(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        """Compute the causal depthwise convolution of x [T, C] with weight [C, W]. conv is [C, W - 1]."""
        joined = torch.cat([state["conv"], inputs["x"].T], dim=1)  # [C, W - 1 + T]
        output = self.convolve(joined, inputs["weight"])
        if "bias" in inputs:
            output = output + inputs["bias"][:, None]
        return self.activate(facts, output).T, {"conv": self.last_columns(joined, facts["width"])}

    def convolve(self, joined: Tensor, weight: Tensor) -> Tensor:
        """Return [C, T]: each token convolved with the W - 1 before it."""
        num_tokens = joined.shape[1] - weight.shape[1] + 1
        taps = (weight[:, j : j + 1] * joined[:, j : j + num_tokens] for j in range(weight.shape[1]))
        return torch.stack(list(taps)).sum(0)

    def last_columns(self, joined: Tensor, width: int) -> Tensor:
        """Return the next conv state: the newest W - 1 inputs, oldest first."""
        return joined[:, joined.shape[1] - (width - 1) :]

    def activate(self, facts: Facts, value: Tensor) -> Tensor:
        return F.silu(value) if facts["activation"] == "silu" else value

    def mamba1(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        """Compute the selective scan of x [T, D]. ssm is [D, N]."""
        d = self.time_step(facts, inputs)  # [T, D]
        decay = self.decay(d[..., None] * inputs["A"])  # [T, D, N]
        increment = (d * inputs["x"])[..., None] * inputs["B"][:, None, :]
        states = self.scan(decay, increment, state["ssm"])  # [T, D, N]
        output = (states * inputs["C"][:, None, :]).sum(-1)
        return self.finish(output, inputs, inputs.get("D")), {"ssm": states[-1]}

    def mamba2(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        """Compute the selective scan of x [T, H, P] with one decay per head. ssm is [H, P, N]."""
        d = self.time_step(facts, inputs)  # [T, H]
        b, c = (self.per_head(inputs[name], facts["num_heads"]) for name in ("B", "C"))  # [T, H, N]
        decay = self.decay(d * inputs["A"])[..., None, None]
        increment = (d[..., None] * inputs["x"])[..., None] * b[:, :, None, :]  # [T, H, P, N]
        states = self.scan(decay, increment, state["ssm"])
        output = (states * c[:, :, None, :]).sum(-1)
        return self.finish(output, inputs, self.skip_of_heads(inputs)), {"ssm": states[-1]}

    def gated_delta(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        """Compute the gated delta rule of q, k [T, Hk, K] and v [T, Hv, V]. delta is [Hv, K, V]."""
        q, k = self.queries_and_keys(facts, inputs)  # [T, Hv, K]
        decay = self.decay(inputs["g"])
        delta, outputs = state["delta"], []
        for t in range(q.shape[0]):
            delta = decay[t, :, None, None] * delta
            predicted = torch.einsum("hk,hkv->hv", k[t], delta)
            correction = inputs["beta"][t, :, None] * (inputs["v"][t] - predicted)
            delta = delta + k[t][..., None] * correction[:, None, :]
            outputs.append(torch.einsum("hk,hkv->hv", q[t], delta))
        return torch.stack(outputs), {"delta": delta}

    def scan(self, decay: Tensor, increment: Tensor, initial: Tensor) -> Tensor:
        """Return the states [T, ...] of h[t] = decay[t] * h[t - 1] + increment[t]."""
        states = torch.empty_like(increment)
        previous = initial
        for t in range(increment.shape[0]):
            previous = torch.addcmul(increment[t], decay[t], previous)
            states[t] = previous
        return states

    def time_step(self, facts: Facts, inputs: Tensors) -> Tensor:
        """Return dt with its bias, made positive, clamped."""
        d = self.biased(inputs)
        if facts["dt_softplus"]:
            d = F.softplus(d)
        return d.clamp(*facts["dt_limit"]) if "dt_limit" in facts else d

    def biased(self, inputs: Tensors) -> Tensor:
        return inputs["dt"] + inputs["dt_bias"] if "dt_bias" in inputs else inputs["dt"]

    def decay(self, logarithm: Tensor) -> Tensor:
        return torch.exp(logarithm)

    def per_head(self, grouped: Tensor, num_heads: int) -> Tensor:
        """Expand [T, groups, N] to [T, num_heads, N]. Neighbouring heads share a group."""
        return grouped.repeat_interleave(num_heads // grouped.shape[1], dim=1)

    def queries_and_keys(self, facts: Facts, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Return scaled q and k for each value head, both normalised if the layer requires it."""
        q, k = inputs["q"], inputs["k"]
        if facts["qk_l2norm"]:
            q, k = self.unit(q), self.unit(k)
        heads = facts["num_v_heads"]
        return self.per_head(q * facts["scale"], heads), self.per_head(k, heads)

    def unit(self, value: Tensor) -> Tensor:
        return value * torch.rsqrt(value.square().sum(-1, keepdim=True) + 1e-6)

    def skip_of_heads(self, inputs: Tensors) -> Tensor | None:
        return inputs["D"][:, None] if "D" in inputs else None

    def finish(self, output: Tensor, inputs: Tensors, skip: Tensor | None) -> Tensor:
        """Apply the skip connection, then the gate."""
        if skip is not None:
            output = output + skip * inputs["x"]
        return output * F.silu(inputs["z"]) if "z" in inputs else output
