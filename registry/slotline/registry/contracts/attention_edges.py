"""Computations at the edges of attention that a backend may take over from the model.

A layer does more than attention: it norms and rotates queries and keys, stores keys and values, and gates or rounds the
output. A backend that does some of this in its own kernels declares it in `AttentionCapabilities.edges`. The family
says in `AttentionLayer.edges` what its layer could hand over. The plan has what both name, and the reason (N186) for
each edge that the model keeps. Nothing is refused for an edge: the model computes what no backend takes.

`StoringAttend.edges` tells the model in each step what it may hand over. It then calls attention with ``edges=``:

* `write` is not called. `forward` gets ``edges=`` and stores the step's keys and values itself.
* A call has any of the edges that were named, or none. `expansion` is never with `rotary`, `norm` or `gate`.
* A call without ``edges=`` means what it always meant. Its `write` and `forward` do nothing at the edges.
* A backend may leave the edges of a step to the model, by `takes_edges` of its plan (see `AttentionBackend.plan`).
* Tensors in it are inputs and stay unchanged, except `scales`. Rows after `num_tokens` are padding.

The edges, in the order in which they are computed:

* ``norm``: each head of the query and of the key is normed, ``x / sqrt(mean(x ** 2) + eps) * (offset + weight)``
  (Zhang and Sennrich 2019, arXiv 1910.07467), before it is rotated.
* ``rotary``: the first `rotary_size` numbers of each head of the query and of the key are rotated (Su et al. 2021,
  arXiv 2104.09864). Number i is paired with number i + rotary_size / 2: ``(a, b)`` becomes ``(a cos - b sin, b cos + a
  sin)``.
* ``expansion``: for layers with `AttentionLayer.mla`. The query is not absorbed, and the backend applies the projection
  from latents itself: to the keys and values (as suits long prompts) or to the query and the output (as suits one
  token), by its own choice for each request. `out` is [num_tokens, num_heads, value size].
* ``gate``: the output is multiplied by the sigmoid of the gate.
* ``rounded``: `out` is int8. Each of its groups of numbers was divided by a scale of its own, ``max |x| / 127``, and
  rounded to the nearest whole number. A group of zeros has the scale 0.

Scores, and the LSE, are those of normed and rotated queries and keys. The cache holds normed and rotated keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch

NORM, ROTARY, EXPANSION, GATE, ROUNDED = EDGES = ("norm", "rotary", "expansion", "gate", "rounded")
"""Names of the edges, in the order in which they are computed."""


@frozen(kw_only=True, eq=False)
class HeadNorm:
    """RMS norm of each head.

    Attributes:
        weight: [head_size].
        eps: added to the mean square.
        offset: added to the weight.
    """

    weight: torch.Tensor
    eps: float
    offset: float = 0.0


@frozen(kw_only=True, eq=False)
class AttentionEdges:
    """What one call of attention computes at its edges. None stands for an edge that the model has computed.

    Attributes:
        query_norm, key_norm: of the heads of queries and keys. Both or neither are given.
        cos, sin: [num_tokens, rotary_size or half of it], in the dtype of activations. If both halves are there, the
            second is of the second numbers of pairs. Both or neither are given.
        rotary_size: numbers of a head that are rotated, from the first on.
        expansion: [num_heads, plain size + value size, rank]: from a latent to the keys without positions and the
            values of all heads. The query is [num_tokens, num_heads, plain size + rotary size].
        gate: [num_tokens, num_heads, head_size_v].
        scales: [num_tokens, n] float32 for a rounded output, written by the backend. Numbers of all heads of a token
            are divided into n groups of equal size, in order.
    """

    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    rotary_size: int = 0
    expansion: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    scales: torch.Tensor | None = None
