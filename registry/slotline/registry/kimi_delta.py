"""Kimi Delta Attention, a kind of state layer beside those of the contract (Kimi Linear, arXiv 2510.26692, section 3).

It is the gated delta rule with a decay for each channel of the keys. Inputs: q, k [T, H, K], v [T, H, V], g [T, H, K]
float32, the logarithm of the decay (at most 0), beta [T, H]. Facts: num_heads H, head_size_k K, head_size_v V, scale. q
and k are divided by sqrt(sum of squares + 1e-6), and q is multiplied by `scale`. Then S = diag(exp(g)) S, S = S + k
(outer) (beta * (v - S^T k)), and y = S^T q. The state is delta [H, K, V], the output [T, H, V].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slotline.registry.contracts.state import StateKind

if TYPE_CHECKING:
    import torch

NAME = "kda"


def step(
    facts: Mapping[str, Any], token: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the output [H, V] of one token and the state after it, by definition."""
    q, k = (token[name] / (token[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in ("q", "k"))
    decayed = token["g"].exp()[..., None] * state["delta"]
    predicted = (decayed * k[..., None]).sum(-2)  # [H, V]
    correction = token["beta"][..., None] * (token["v"] - predicted)
    delta = decayed + k[..., None] * correction[..., None, :]
    return (delta * (q * facts["scale"])[..., None]).sum(-2), {"delta": delta}


def draw(facts: Mapping[str, Any], count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random inputs of `count` tokens, with a memory of some eight tokens."""
    import torch

    heads, keys, values = facts["num_heads"], facts["head_size_k"], facts["head_size_v"]
    shapes = {"q": (heads, keys), "k": (heads, keys), "v": (heads, values), "g": (heads, keys), "beta": (heads,)}
    drawn = {name: torch.randn(count, *shape, generator=generator) for name, shape in shapes.items()}
    return drawn | {"g": -drawn["g"].abs() / 8, "beta": drawn["beta"].sigmoid()}


KDA = StateKind(
    token_inputs=("q", "k", "v", "g", "beta"),
    parameters=(),
    optional=(),
    facts=("num_heads", "head_size_k", "head_size_v", "scale"),
    tensors={"delta": ("num_heads", "head_size_k", "head_size_v")},
    output="v",
    step=step,
    draw=draw,
    wide=("g",),
    sizes=(
        {"num_heads": 3, "head_size_k": 12, "head_size_v": 5, "scale": 12**-0.5},
        {"num_heads": 2, "head_size_k": 16, "head_size_v": 16, "scale": 0.25},
        {"num_heads": 1, "head_size_k": 7, "head_size_v": 24, "scale": 0.4},
    ),
)
