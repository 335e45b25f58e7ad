"""Bugs in going back to an accepted position, and in copying."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.registry.contracts.state import StateContext, StateLayer
from slotline.testing.check import Level
from slotline.testing.mutants.state.common import mutant
from slotline.testing.reference.state import ReferenceState
from slotline.testing.reference.state.backend import Row
from slotline.testing.reference.state.recurrences import State, Tensors


class CommitIgnored(ReferenceState):
    """A commit does nothing: rejected drafts stay in the state."""

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        pass


class CommitOneMore(ReferenceState):
    """A commit keeps one token more than was accepted, where there is one."""

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        held = [len(self.trails[layer.name].get(row, ())) for row in range(len(slots))]
        most = torch.tensor(held, dtype=accepted.dtype, device=accepted.device).clamp(min=1)
        super().commit(layer, state, slots, torch.minimum(accepted + 1, most))


class CommitOneLess(ReferenceState):
    """A commit keeps one token less than was accepted, but for the first."""

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        super().commit(layer, state, slots, (accepted - 1).clamp(min=1))


class CommitByFirstRow(ReferenceState):
    """A commit takes the first row's number of accepted tokens for all, as far as each has them."""

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        held = [len(self.trails[layer.name].get(row, ())) for row in range(len(slots))]
        most = torch.tensor(held, dtype=accepted.dtype, device=accepted.device).clamp(min=1)
        super().commit(layer, state, slots, torch.minimum(accepted[:1].expand_as(accepted), most))


class CommitPadding(ReferenceState):
    """A commit does not skip slot -1 and writes the last slot instead."""

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        last = next(iter(state.values())).shape[0] - 1
        kept = [row in self.trails[layer.name] for row in range(len(slots))]
        known = torch.tensor(kept, device=slots.device)
        super().commit(layer, state, torch.where((slots < 0) & known, last, slots), accepted)


class CommitOfNobody(ReferenceState):
    """A commit in which every row is to be left alone fails."""

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        super().commit(layer, state, slots, accepted.clamp(max=int(accepted[slots >= 0].max())))


class CommitOfOtherLayer(ReferenceState):
    """All layers share the data kept for a commit, so the last layer's is written into each."""

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        same = [name for name in self.trails if name.rpartition(".")[2] == layer.state_kind]
        self.trails[layer.name] = self.trails[same[-1]]
        super().commit(layer, state, slots, accepted)


class NoTrailInMixedBatch(ReferenceState):
    """In a batch with a prompt nothing is kept for a commit, which then does nothing."""

    def forward(self, layer: StateLayer, inputs: Tensors, state: Tensors, plan: list[Row]) -> Tensor:
        output = super().forward(layer, inputs, state, plan)
        if any(row.num_tokens > 1 + self.max_draft_tokens for row in plan):
            self.trails[layer.name] = {}
        return output

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        if self.trails[layer.name]:
            super().commit(layer, state, slots, accepted)


class WaitsForCommit(ReferenceState):
    """Until a commit the state is as after the first token only."""

    def advance(self, layer: StateLayer, inputs: Tensors, before: State, row: Row) -> tuple[Tensor, State]:
        output, after = super().advance(layer, inputs, before, row)
        kept = self.trails[layer.name].get(row.position)
        return output, kept[0] if kept else after


class TrailWithoutStart(ReferenceState):
    """The states kept for a commit start from zeros instead of the request's state."""

    def advance(self, layer: StateLayer, inputs: Tensors, before: State, row: Row) -> tuple[Tensor, State]:
        zeros = {name: torch.zeros_like(value) for name, value in before.items()}
        super().advance(layer, inputs, zeros, row)
        return self.recur(layer, inputs, before)


class CopyAliases(ReferenceState):
    """A copy only notes where the original is, and reads it when it is needed."""

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        self.original: dict[int, int] = {}

    def copy(self, layer: StateLayer, state: Tensors, source: int, target: int) -> None:
        self.original[target] = source

    def initial(self, layer: StateLayer, state: Tensors, row: Row) -> State:
        source = self.original.pop(row.slot, row.slot)
        return super().initial(
            layer,
            {name: value[source][None] for name, value in state.items()},
            Row(row.position, row.first, row.last, 0, row.has_initial_state),
        )


class CopyForgetsLast(ReferenceState):
    """A copy leaves out the last channel or head."""

    def copy(self, layer: StateLayer, state: Tensors, source: int, target: int) -> None:
        for value in state.values():
            value[target, :-1] = value[source, :-1]


class CopyBackwards(ReferenceState):
    """A copy goes from the target to the source."""

    def copy(self, layer: StateLayer, state: Tensors, source: int, target: int) -> None:
        super().copy(layer, state, target, source)


class CopyMoves(ReferenceState):
    """A copy clears the original."""

    def copy(self, layer: StateLayer, state: Tensors, source: int, target: int) -> None:
        super().copy(layer, state, source, target)
        for value in state.values():
            value[source] = 0


class CopyOfWholePage(ReferenceState):
    """A copy takes the whole page, the tensors of other layers included."""

    def copy(self, layer: StateLayer, state: Tensors, source: int, target: int) -> None:
        for value in state.values():
            page = value.as_strided((value.shape[0], value.stride(0)), (value.stride(0), 1), 0)
            page[target] = page[source]


MUTANTS = (
    mutant("commit-ignored", CommitIgnored, Level.HOSTILE, "mamba2"),
    mutant("commit-one-more", CommitOneMore, Level.HOSTILE, "mamba1"),
    mutant("commit-one-less", CommitOneLess, Level.HOSTILE, "gated_delta"),
    mutant("conv-commit-ignored", CommitIgnored, Level.HOSTILE, "short_conv"),
    mutant("commit-by-first-row", CommitByFirstRow, Level.HOSTILE, "mamba2"),
    mutant("commit-writes-padding", CommitPadding, Level.HOSTILE, "mamba1"),
    mutant("commit-of-nobody-fails", CommitOfNobody, Level.STATEFUL, "mamba2"),
    mutant("commit-of-other-layer", CommitOfOtherLayer, Level.HOSTILE, "mamba2"),
    mutant("no-rollback-beside-prompts", NoTrailInMixedBatch, Level.HOSTILE, "short_conv"),
    mutant("waits-for-commit", WaitsForCommit, Level.HOSTILE, "mamba2"),
    mutant("rollback-from-zeros", TrailWithoutStart, Level.HOSTILE, "gated_delta"),
    mutant("copy-aliases", CopyAliases, Level.HOSTILE, "mamba2"),
    mutant("copy-forgets-last", CopyForgetsLast, Level.HOSTILE, "mamba1"),
    mutant("copy-backwards", CopyBackwards, Level.HOSTILE, "short_conv"),
    mutant("copy-moves", CopyMoves, Level.HOSTILE, "gated_delta"),
    mutant("copy-of-whole-page", CopyOfWholePage, Level.HOSTILE, "mamba2"),
)
