"""Checks of a draft's form, verification of drafts, and a test of distributions.

Rejection sampling is that of Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding"
(2023), algorithm 1, and of Chen et al., "Accelerating large language model decoding with speculative sampling" (2023),
theorem 1. Everything is float64 and one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen

from slotline.registry.contracts import Draft, DrafterCapabilities

Array = np.ndarray[Any, np.dtype[np.float64]]

SIGNIFICANCE = 1e-6
"""Level of every chi-square test: of correct drafters one in a million is rejected, and seeds are fixed, so one that
passes once passes always."""

SUM_ERRORS = 8.0
"""A row of probabilities may miss 1 by this many square roots of the vocabulary times the dtype's epsilon. Measured for
a softmax in float32 over 8 to 150,000 tokens: at most 0.61 of such a unit. A row that was never normalised misses by
far more."""

PROBABILITY_ERRORS = 64.0
"""Probabilities of one history may differ between two batches by this many float32 epsilons, since batched products sum
in another order. Measured for logits of size 3 from 256 features: at most 20. Another history changes the first
digits."""


@frozen
class Fault:
    """Fault in the form of a draft: the violated rule, and a sentence."""

    rule: str
    text: str


def draft_faults(
    draft: Draft,
    rows: Sequence[int],
    *,
    num_tokens: int,
    vocab_size: int,
    declared: DrafterCapabilities,
    form: str = "tree",
) -> list[Fault]:
    """Return all faults in the form of a draft.

    Rules: ``shape``, ``vocabulary``, ``end``, ``parts``, ``probabilities``, ``parents``.

    Args:
        draft: the answer of `propose`.
        rows: the requests that it was asked for, in this order.
        num_tokens, form: as in `DrafterContext`. Where trees are verified as chains, parents may be left out.
        vocab_size: tokens of the vocabulary.
        declared: what the drafter declares.
    """
    ids = getattr(draft, "token_ids", None)
    if not isinstance(ids, torch.Tensor):
        return [Fault("shape", f"propose returned {type(draft).__name__} without a tensor as token_ids")]
    if ids.dtype is not torch.int64:
        return [Fault("shape", f"token_ids are {ids.dtype}, the contract says torch.int64")]
    if ids.dim() != 2 or ids.shape[0] != len(rows) or ids.shape[1] > num_tokens:
        return [Fault("shape", f"token_ids have shape {tuple(ids.shape)}, wanted [{len(rows)}, at most {num_tokens}]")]
    found = list(_id_faults(ids.cpu(), rows, vocab_size)) + list(_part_faults(draft, declared, form))
    if not found and draft.probabilities is not None:
        found += _probability_faults(draft.probabilities, ids.cpu(), rows, vocab_size)
    if not found and draft.parents is not None:
        found += _parent_faults(draft.parents, rows, ids.shape[1], declared, form)
    return found


def _id_faults(ids: torch.Tensor, rows: Sequence[int], vocab_size: int) -> list[Fault]:
    found = []
    for row, tokens in zip(rows, ids.tolist(), strict=True):
        for position, token in enumerate(tokens):
            where = f"row {row}, draft position {position}: token_ids {tokens}"
            if not -1 <= token < vocab_size:
                found.append(Fault("vocabulary", f"{where}: {token} is neither -1 nor in [0, {vocab_size})"))
            elif position and tokens[position - 1] == -1 and token != -1:
                found.append(Fault("end", f"{where}: -1 ends a proposal, yet {token} follows it"))
    return found


def _part_faults(draft: Draft, declared: DrafterCapabilities, form: str) -> list[Fault]:
    found = []
    for name, value, flag in (
        ("probabilities", draft.probabilities, declared.probabilities),
        ("parents", draft.parents, declared.tree),
    ):
        needed = bool(flag.support)
        if needed and value is None and not (name == "parents" and form == "chain"):
            found.append(Fault("parts", f"{name} are None, though the descriptor declares them"))
        if not needed and value is not None:
            found.append(Fault("parts", f"{name} are given, though the descriptor does not declare them"))
    return found


def _probability_faults(
    probabilities: torch.Tensor, ids: torch.Tensor, rows: Sequence[int], vocab_size: int
) -> list[Fault]:
    wanted = (*ids.shape, vocab_size)
    if tuple(probabilities.shape) != wanted:
        return [Fault("probabilities", f"probabilities have shape {tuple(probabilities.shape)}, wanted {wanted}")]
    if probabilities.dtype not in (torch.float32, torch.float64):
        return [Fault("probabilities", f"probabilities are {probabilities.dtype}, wanted torch.float32 or float64")]
    allowed = SUM_ERRORS * vocab_size**0.5 * torch.finfo(probabilities.dtype).eps
    values = probabilities.double().cpu()
    totals, least = values.sum(dim=-1), values.amin(dim=-1)
    right = (least >= 0) & ((totals - 1).abs() <= allowed)
    return [
        Fault(
            "probabilities",
            f"row {rows[index]}, draft position {position}: the probabilities sum to {totals[index, position]:.6g}, "
            f"which may miss 1 by {allowed:.1g}; the least is {least[index, position]:.3g}",
        )
        for index, position in ((ids >= 0) & ~right).nonzero().tolist()
    ]


def _parent_faults(
    parents: torch.Tensor, rows: Sequence[int], length: int, declared: DrafterCapabilities, form: str
) -> list[Fault]:
    """Return the first fault of one tree for all requests, or of each request's tree where such were declared."""
    shapes: list[tuple[int, ...]] = [(length,)]
    if declared.request_trees.support and form != "tree":
        shapes.append((len(rows), length))
    if not isinstance(parents, torch.Tensor) or parents.dtype is not torch.int64 or tuple(parents.shape) not in shapes:
        given = f"{parents.dtype} {tuple(parents.shape)}" if isinstance(parents, torch.Tensor) else repr(parents)[:80]
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        return [Fault("parents", f"parents are {given}, wanted torch.int64 {wanted} where the form is {form!r}")]
    for index, tree in enumerate(parents.reshape(-1, length).tolist()):
        whose = f"row {rows[index]}: " if parents.dim() == 2 else ""
        for node, parent in enumerate(tree):
            if not -1 <= parent < node:
                return [Fault("parents", f"{whose}node {node} has parent {parent}: neither -1 nor a node before it")]
    return []


def verify_by_match(
    draft: Sequence[int], parents: Sequence[int] | None, choose: Callable[[tuple[int, ...]], int]
) -> tuple[int, ...]:
    """Return the tokens of one step, verified by comparison.

    `choose` (the argmax, or a draw) returns the token after each prefix. Drafts are accepted as long as they are equal
    to it. For one-point proposals this gives the target's distribution, for chains and for trees.
    """
    before = list(range(-1, len(draft) - 1)) if parents is None else list(parents)
    taken: tuple[int, ...] = ()
    node = -1
    while True:
        token = choose(taken)
        taken += (token,)
        child = next((i for i, p in enumerate(before) if p == node and draft[i] == token and i > node), None)
        if child is None:
            return taken
        node = child


def verify_by_rejection(
    draft: Sequence[int],
    proposed: Array,
    target: Callable[[tuple[int, ...]], Array],
    uniform: Callable[[], float],
) -> tuple[int, ...]:
    """Return the tokens of one step of a chain with probabilities, verified by rejection sampling.

    Token x is accepted with min(1, p(x)/q(x)). Otherwise a token is drawn from the positive part of p - q. If the whole
    draft is accepted, it is followed by a draw from p.
    """
    taken: tuple[int, ...] = ()
    for token, q in zip(draft, proposed, strict=True):
        p = target(taken)
        if uniform() * q[token] >= p[token]:
            rest = np.maximum(p - q, 0)
            return (*taken, draw(rest if rest.sum() > 0 else p, uniform()))
        taken += (token,)
    return (*taken, draw(target(taken), uniform()))


def draw(weights: Array, uniform: float) -> int:
    """Return the token at a quantile of a distribution, which need not be normalised. Its weight is never zero."""
    cumulated = np.cumsum(weights)
    index = int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))


@frozen
class ChiSquare:
    """Result of Pearson's test: statistic, degrees of freedom, and the probability of a value at least as large."""

    statistic: float
    freedom: int
    p_value: float


def chi_square(groups: Mapping[Any, tuple[Array, Array]]) -> ChiSquare:
    """Run Pearson's test over independent groups of (observed counts, expected counts), summed.

    Within a group, cells that expect fewer than five are merged. If an impossible value was observed, the statistic is
    infinite.
    """
    statistic, freedom = 0.0, 0
    for observed, expected in groups.values():
        if observed[expected <= 0].sum() > 0:
            return ChiSquare(float("inf"), freedom + 1, 0.0)
        seen, wanted = _merged(observed, expected)
        statistic += float((((seen - wanted) ** 2) / wanted).sum())
        freedom += max(len(seen) - 1, 0)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1])) if freedom else 1.0
    return ChiSquare(statistic, freedom, p_value)


def _merged(observed: Array, expected: Array) -> tuple[Array, Array]:
    """Return both counts with the rare cells merged, and merged with the next rarest cell if they are still rare."""
    order = np.argsort(-expected)
    large = int((expected >= 5).sum())
    if expected[order[large:]].sum() < 5:
        large = max(large - 1, 0)
    starts = [*range(large), large] if expected[order[large:]].sum() > 0 else list(range(large))
    return np.add.reduceat(observed[order], starts), np.add.reduceat(expected[order], starts)
