"""Expected attention in float64, and the allowed error of a backend.

`attention` is the textbook formula over dense keys and values, one request at a time. `tolerance` compares a backend
with the same formula computed in the backend's own dtype. A fixed tolerance would reject correct kernels at short
contexts and accept wrong kernels at long contexts. docs/decisions/tolerance.md has the measurements for the constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from attrs import frozen


class Answer(NamedTuple):
    """Attention of one request.

    Attributes:
        out: [q, H, Dv], in the dtype of the computation.
        lse: [H, q] float64, natural logarithm of the sum of exponentials. A sink counts as one more key.
        max_score: largest absolute score that a query sees, after scale and soft cap.
    """

    out: torch.Tensor
    lse: torch.Tensor
    max_score: float


@frozen
class Tolerance:
    """Constants of the tolerance rule (see docs/decisions/tolerance.md).

    Attributes:
        baseline: factor on the error of the same formula computed in the backend's dtype.
        floor: factor on ``eps_accumulate * (1 + max|score|) * max|V|``. Scores have a relative error of about
            eps_accumulate, which the exponential turns into that absolute error of a weight.
        ulps: units in the last place of the largest output, for the final rounding.
        lse: factor on ``eps_accumulate * (1 + max|score|)`` for the LSE, which is always float32.
    """

    baseline: float = 3.0
    floor: float = 2.0
    ulps: float = 2.0
    lse: float = 16.0


DEFAULT = Tolerance()
STRICT = Tolerance(baseline=2.0)
EPS_ACCUMULATE = torch.finfo(torch.float32).eps
"""Kernels accumulate in float32 at least, whatever the dtype of their inputs."""


class Allowed(NamedTuple):
    """Allowed error of a backend, as largest absolute error: of the output, of the LSE, and the baseline's error."""

    out: float
    lse: float
    baseline: float


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: Sequence[float] | None = None,
    biases: Sequence[Sequence[float]] | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
    seen: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> Answer:
    """Compute attention of a request's last tokens over all of its tokens, with all arithmetic in `dtype`.

    Args:
        query: [q, H, D], the last q of L tokens.
        keys: [L, Hkv, D], the new tokens included. Query head h reads KV head ``h // (H // Hkv)``.
        values: [L, Hkv, Dv].
        scale: factor on the scores.
        window: a query sees this many keys, its own included, and as many in the other direction if it is not causal.
            None for all.
        soft_cap: scores become ``cap * tanh(score / cap)``.
        sinks: [H], a logit that takes part in the softmax and has no value.
        slopes: [H], the amount that a score loses after the soft cap per token of distance (ALiBi).
        biases: [H, n], what is added after the soft cap by distance, the last also beyond n tokens.
        causal: True if a query sees no key after its own.
        dtype: dtype of the computation. Inputs are converted, not rounded again.
        seen: [q, L] bool, the keys that each query sees, if `window` and `causal` are not sufficient.
        positions: [L], the tokens' positions in a text, for `slopes` and `biases`. None for 0 to L - 1.
    """
    num_kv_heads, shape = keys.shape[1], (query.shape[1], len(query), len(keys))
    rows = query.shape[1] // num_kv_heads * len(query)  # of one KV head
    q, k, v = query.to(dtype), keys.to(dtype), values.to(dtype)
    grouped = q.transpose(0, 1).reshape(num_kv_heads, rows, q.shape[2])
    scores = (torch.matmul(grouped, k.permute(1, 2, 0)) * scale).view(shape)  # [H, q, L]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if slopes is not None or biases is not None:
        place = torch.arange(len(k)) if positions is None else positions
        distance = (place[None, :] - place[len(k) - len(q) :, None]).double()  # [q, L]
    if biases is not None:
        added = torch.tensor(biases, dtype=torch.float64)
        scores = scores + added[:, (-distance).long().clamp(0, added.shape[1] - 1)].to(scores)
    if slopes is not None:
        scores = scores + (torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance).to(scores)
    seen = visible(len(q), len(k), window=window, causal=causal) if seen is None else seen
    seen = seen.to(scores.device)
    largest = float(scores.masked_fill(~seen, 0.0).abs().max()) if scores.numel() else 0.0
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], 2)
    weights = torch.softmax(scores, 2)[:, :, : len(k)]
    grouped = weights.reshape(num_kv_heads, rows, len(k))
    out = torch.matmul(grouped, v.transpose(0, 1)).view(*shape[:2], v.shape[2]).transpose(0, 1)
    return Answer(out, torch.logsumexp(scores.double(), 2), largest)


def probabilities(
    query: torch.Tensor,
    keys: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return how much a request's last tokens attend to each key, [L, Hkv] float64: head by head, query by query.

    The mean is taken over the queries and over the query heads of each KV head. The arguments are those of `attention`.
    """
    found = torch.zeros(len(keys), keys.shape[1], dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    for head in range(query.shape[1]):
        for place, row in enumerate(query[:, head].double().cpu(), len(keys) - len(query)):
            first = 0 if window is None else max(0, place + 1 - window)
            logits = keys[first : place + 1, head // group].double().cpu() @ row * scale
            logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
            if sinks is not None:
                logits = torch.cat([logits, sinks[head : head + 1].double().cpu()])
            weights = torch.softmax(logits, 0)[: place + 1 - first]
            found[first : place + 1, head // group] += weights / (group * len(query))
    return found


def picked(
    query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor, seen: torch.Tensor, most: int
) -> torch.Tensor:
    """Return, as [q, L] bool, the keys that an index picks for each query, with all arithmetic in float64.

    Args:
        query: [q, heads, size] of the index.
        keys: [L, size] of the index.
        weight: [q, heads].
        seen: [q, L] bool, the keys that may be picked.
        most: keys of one query. Of equal scores the first are picked.
    """
    products = torch.einsum("qhd,ld->qhl", query.double(), keys.double()).clamp_min(0.0)
    scores = torch.einsum("qh,qhl->ql", weight.double(), products).masked_fill(~seen, -torch.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]
    return torch.zeros_like(seen).scatter(1, order, True) & seen


def visible(num_queries: int, num_keys: int, *, window: int | None = None, causal: bool = True) -> torch.Tensor:
    """Return, as [q, L] bool, the keys that the last `num_queries` of `num_keys` tokens see."""
    position = torch.arange(num_keys)[None, :]
    own = torch.arange(num_keys - num_queries, num_keys)[:, None]
    seen = position <= own if causal else torch.ones(num_queries, num_keys, dtype=torch.bool)
    return seen if window is None else seen & (position > own - window) & (position < own + window)


def tolerance(
    exact: Answer, eager: Answer, values: torch.Tensor, dtype: torch.dtype, rule: Tolerance = DEFAULT
) -> Allowed:
    """Return the allowed difference of a backend from `exact`.

    Args:
        exact: the answer in float64.
        eager: the same formula in `dtype`.
        values: [L, Hkv, Dv], the values that the request may see.
        dtype: the coarsest dtype that the backend computes in.
        rule: the constants.
    """
    baseline = _worst(eager.out.double() - exact.out)
    conditioned = EPS_ACCUMULATE * (1 + exact.max_score)
    unit = torch.finfo(dtype).eps * _worst(exact.out)
    out = rule.baseline * baseline + rule.floor * conditioned * _worst(values.double()) + rule.ulps * unit
    lse = rule.baseline * _worst(eager.lse - exact.lse) + rule.lse * conditioned
    return Allowed(out, lse, baseline)


def _worst(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
