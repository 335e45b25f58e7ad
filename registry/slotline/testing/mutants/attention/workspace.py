"""Mutants that misuse the workspace that they declare, and a right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slotline.registry.contracts.attention import AttentionContext, AttentionLayer
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.attention.making import mutant, offer
from slotline.testing.reference.attention.backend import EagerAttention


def one_sum(context: AttentionContext) -> int:
    """Return room for a float32 for each query head."""
    return 4 * context.layers[0].num_heads


class Kept(EagerAttention):
    """Keeps the sums of the last query's weights in its workspace, and divides by them there."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        assert context.workspace is not None
        self.sums = context.workspace.view(torch.float32)

    def begin(self) -> None:
        """Make the workspace ready for a request."""
        self.sums.zero_()

    def attend(
        self, layer: AttentionLayer, query: Any, keys: Any, values: Any, seen: Any, sinks: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().attend(layer, query, keys, values, seen, sinks)
        self.begin()
        self.sums += lse[:, -1]
        return out, torch.cat([lse[:, :-1], self.sums[:, None]], 1)

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self.begin()
        self.sums += weights[:, -1].sum(1)
        return super().combine(weights, values) * (self.sums / weights[:, -1].sum(1))[None, :, None]


class NotCleared(Kept):
    """Adds to what the step before left in the workspace."""

    def begin(self) -> None:
        pass


class PastTheEnd(Kept):
    """Clears one number more than it has."""

    def begin(self) -> None:
        torch.as_strided(self.sums, (len(self.sums) + 1,), (1,)).zero_()


def shrinking(context: AttentionContext) -> int:
    """Return fewer bytes for more requests."""
    return 4 * context.layers[0].num_heads + max(0, 1024 - context.max_requests)


def _kept(name: str, level: Level, summary: str, factory: Callable[..., Any], size: Any = one_sum) -> Mutant:
    return mutant(name, level, summary, factory, workspace=size)


class Roomy(Kept):
    """Uses only the beginning of what it has."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.sums = self.sums[: context.layers[0].num_heads]


MUTANTS = (
    _kept("workspace-not-cleared", Level.NUMERICS, "what is in the workspace before a step counts", NotCleared),
    _kept("workspace-past-the-end", Level.HOSTILE, "a number behind the workspace is written", PastTheEnd),
    _kept("workspace-shrinks", Level.CONTRACT, "the workspace shrinks with more requests", Roomy, shrinking),
)
CORRECT = (Correct("keeps sums in a workspace", offer("kept", "keeps sums", Kept, workspace=one_sum)),)
