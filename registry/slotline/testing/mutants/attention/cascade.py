"""Mutants that get a common prefix wrong, and a right backend that serves it apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen

from slotline.registry.capability import Flag
from slotline.registry.contracts.attention import AttentionBatch, AttentionLayer, KVCache
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.attention.making import mutant, offer
from slotline.testing.reference.attention.backend import EagerAttention, Plan


@frozen(eq=False, kw_only=True)
class CascadePlan(Plan):
    """Plan with the length of the common prefix. `prefix` is a plan of one request for all query tokens."""

    common: int = 0
    prefix: Plan | None = None


class CascadeAttention(EagerAttention):
    """The common prefix for all query tokens at once, then request by request the rest, merged by LSE.

    As in Juravsky and others, arXiv 2402.05099.
    """

    def use_cascade(
        self, common_prefix_len: int, query_lens: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64]
    ) -> bool:
        """Return True always."""
        return True

    def plan(self, batch: AttentionBatch) -> CascadePlan:
        plan, common = super().plan(batch), self.common(batch)
        masks = (plan.causal, plan.tree, plan.keys_ahead)
        fields = (plan.starts, plan.lengths, plan.block_table, plan.slot_mapping, *masks)
        if not common:
            return CascadePlan(*fields)
        whole = Plan([0, batch.num_tokens], [common], self.prefix_table(batch), plan.slot_mapping, self.prefix_causal)
        return CascadePlan(*fields, common=common, prefix=whole)

    prefix_causal = False

    def common(self, batch: AttentionBatch) -> int:
        """Return the length of the separate prefix."""
        return batch.common_prefix_len

    def prefix_table(self, batch: AttentionBatch) -> torch.Tensor:
        """Return the row of the block table that the prefix is read from, [1, max_blocks]."""
        return batch.block_table[:1]

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Both parts in float32, then their merge."""
        if plan.prefix is None:
            return super().forward(layer, query, key, value, cache, plan, out, sinks)
        rest, shared = (torch.zeros_like(out, dtype=torch.float32) for _ in range(2))
        tokens = slice(0, plan.starts[-1])
        self.begin = plan.common
        rest_lse = super().forward(layer, query, key, value, cache, plan, rest, sinks)
        self.begin = 0
        prefix_sinks = self.prefix_sinks(sinks)
        shared_lse = super().forward(layer, query, key, value, cache, plan.prefix, shared, prefix_sinks)
        assert rest_lse is not None
        assert shared_lse is not None
        merged, lse = self.merge(rest, rest_lse, shared, shared_lse)
        idle = [row for row, length in enumerate(plan.lengths) if length == 0]
        out.zero_()
        out[tokens] = merged[tokens].to(out.dtype)
        for row in idle:
            out[plan.starts[row] : plan.starts[row + 1]] = 0
        return lse

    begin = 0

    def prefix_sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """Return no sinks, because they count once, with the rest."""
        return None

    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        return max(self.begin, super().first_key(layer, num_queries, length))

    def merge(
        self, rest: torch.Tensor, rest_lse: torch.Tensor, shared: torch.Tensor, shared_lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge outputs [T, H, Dv] with their LSE [H, T]."""
        lse = torch.logaddexp(rest_lse, shared_lse)
        own, other = (torch.exp(part - lse).T[:, :, None] for part in (rest_lse, shared_lse))
        return rest * own + shared * other, lse


class NoMethod(CascadeAttention):
    use_cascade = None  # type: ignore[assignment]


class AnswersWithLength(CascadeAttention):
    def use_cascade(self, common_prefix_len: int, query_lens: Any, seq_lens: Any) -> Any:
        return common_prefix_len


class PrefixLost(CascadeAttention):
    def merge(
        self, rest: torch.Tensor, rest_lse: torch.Tensor, shared: torch.Tensor, shared_lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rest, rest_lse


class PrefixTwice(CascadeAttention):
    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        return EagerAttention.first_key(self, layer, num_queries, length)


class MergedInHalves(CascadeAttention):
    def merge(
        self, rest: torch.Tensor, rest_lse: torch.Tensor, shared: torch.Tensor, shared_lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (rest + shared) / 2, torch.logaddexp(rest_lse, shared_lse)


class MergedInBaseTwo(CascadeAttention):
    def merge(
        self, rest: torch.Tensor, rest_lse: torch.Tensor, shared: torch.Tensor, shared_lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logaddexp2(rest_lse, shared_lse)
        own, other = (torch.exp2(part - lse).T[:, :, None] for part in (rest_lse, shared_lse))
        return rest * own + shared * other, lse


class MergedUnsafely(CascadeAttention):
    """Exponentiates the LSE before it compares them."""

    def merge(
        self, rest: torch.Tensor, rest_lse: torch.Tensor, shared: torch.Tensor, shared_lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, other = rest_lse.exp().T[:, :, None], shared_lse.exp().T[:, :, None]
        return (rest * own + shared * other) / (own + other), torch.logaddexp(rest_lse, shared_lse)


class LseOfTheRest(CascadeAttention):
    def merge(
        self, rest: torch.Tensor, rest_lse: torch.Tensor, shared: torch.Tensor, shared_lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        merged, _ = super().merge(rest, rest_lse, shared, shared_lse)
        return merged, rest_lse


class SinkTwice(CascadeAttention):
    def prefix_sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        return sinks


class PrefixMasked(CascadeAttention):
    """Masks the prefix as if the query tokens were its last ones."""

    prefix_causal = True


class PrefixOfTheLast(CascadeAttention):
    """Reads the prefix through the last row of the table, which a padded request may have."""

    def prefix_table(self, batch: AttentionBatch) -> torch.Tensor:
        return batch.block_table[-1:]


class OneBlockShort(CascadeAttention):
    """The prefix ends a block early, and the rest begins where it should have ended."""

    def plan(self, batch: AttentionBatch) -> CascadePlan:
        plan = super().plan(batch)
        if plan.prefix is None or plan.common == self.block_size:
            return plan
        return evolve(plan, prefix=evolve(plan.prefix, lengths=[plan.common - self.block_size]))


class RoundedToSixtyFour(CascadeAttention):
    """Tiles of 64 keys: the rest begins at the start of a tile, the prefix ends at its own end."""

    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        return super().first_key(layer, num_queries, length) // 64 * 64


class FirstPrefixKept(CascadeAttention):
    kept: int | None = None

    def common(self, batch: AttentionBatch) -> int:
        if not batch.common_prefix_len:
            return 0
        if self.kept is None:
            self.kept = batch.common_prefix_len
        return self.kept


class ScaledOnlyBehind(CascadeAttention):
    """Caps only the scores of the rest."""

    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        return super().cap(layer, scores) if self.begin else scores


def _mutant(name: str, level: Level, summary: str, factory: type[CascadeAttention]) -> Mutant:
    return mutant(name, level, summary, factory, cascade=Flag(True))


L0, L1, L2, L3 = Level.CONTRACT, Level.NUMERICS, Level.HOSTILE, Level.STATEFUL

MUTANTS = (
    _mutant("cascade-without-method", L0, "cascade is declared and use_cascade is missing", NoMethod),
    _mutant("cascade-answers-with-length", L0, "use_cascade gives a number", AnswersWithLength),
    _mutant("cascade-prefix-lost", L1, "the common prefix is not read", PrefixLost),
    _mutant("cascade-prefix-twice", L1, "the common prefix counts twice", PrefixTwice),
    _mutant("cascade-merged-in-halves", L1, "prefix and rest count equally", MergedInHalves),
    _mutant("cascade-merged-in-base-2", L1, "the LSE is taken to be in base 2 at the merge", MergedInBaseTwo),
    _mutant("cascade-merged-unsafely", L1, "the merge overflows for large scores", MergedUnsafely),
    _mutant("cascade-lse-of-the-rest", L1, "the LSE leaves the prefix out", LseOfTheRest),
    _mutant("cascade-sink-twice", L1, "a sink counts in both parts", SinkTwice),
    _mutant("cascade-prefix-masked", L1, "the prefix is masked causally", PrefixMasked),
    _mutant("cascade-cap-behind", L1, "the soft cap holds behind the prefix alone", ScaledOnlyBehind),
    _mutant("cascade-one-block-short", L1, "the prefix's last block is lost", OneBlockShort),
    _mutant(
        "cascade-rounded-to-64", L1, "keys between a tile's start and the prefix's end count twice", RoundedToSixtyFour
    ),
    _mutant("cascade-prefix-of-the-last", L2, "the prefix is read through a padded request's table", PrefixOfTheLast),
    _mutant("cascade-first-prefix-kept", L3, "the first step's prefix length is kept", FirstPrefixKept),
)

CORRECT = (
    Correct(
        "cascade: a common prefix for all query tokens at once, merged by LSE",
        offer("cascade", "a common prefix apart", CascadeAttention, cascade=Flag(True)),
    ),
)
