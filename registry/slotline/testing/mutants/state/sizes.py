"""Bugs behind powers of two."""

from __future__ import annotations

import torch
from attrs import evolve
from torch import Tensor

from slotline.registry.contracts.state import StateBatch, StateLayer
from slotline.testing.check import Level
from slotline.testing.mutants.state.common import mutant
from slotline.testing.reference.state import ReferenceState
from slotline.testing.reference.state.backend import Row
from slotline.testing.reference.state.recurrences import Facts, State, Tensors


class FourTaps(ReferenceState):
    """The convolution has four taps at most."""

    def convolve(self, joined: Tensor, weight: Tensor) -> Tensor:
        cut = weight.clone()
        cut[:, :-4] = 0
        return super().convolve(joined, cut)


class EightTaps(ReferenceState):
    """The convolution has eight taps at most."""

    def convolve(self, joined: Tensor, weight: Tensor) -> Tensor:
        cut = weight.clone()
        cut[:, :-8] = 0
        return super().convolve(joined, cut)


class ShortConvState(ReferenceState):
    """The convolution's state is that of four taps, and what is before it is zero."""

    def last_columns(self, joined: Tensor, width: int) -> Tensor:
        kept = super().last_columns(joined, width).clone()
        kept[:, :-3] = 0
        return kept


class ChannelTile(ReferenceState):
    """Channels behind the first 256 are left out."""

    def convolve(self, joined: Tensor, weight: Tensor) -> Tensor:
        output = super().convolve(joined, weight)
        output[256:] = 0
        return output


class ColumnTile(ReferenceState):
    """The state has 128 columns at most."""

    def mamba2(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        output, new = super().mamba2(facts, inputs, state)
        new["ssm"][..., 128:] = 0
        return output, new


class NarrowColumns(ReferenceState):
    """The state has 16 columns at most."""

    def mamba1(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        output, new = super().mamba1(facts, inputs, state)
        new["ssm"][..., 16:] = 0
        return output, new


class KeyTile(ReferenceState):
    """Keys are read in tiles of 64, and what is behind the last whole one is left out."""

    def gated_delta(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        size = facts["head_size_k"]
        k = inputs["k"].clone()
        if size > 64:
            k[..., size // 64 * 64 :] = 0
        return super().gated_delta(facts, {**inputs, "k": k}, state)


class SixteenChunks(ReferenceState):
    """A prompt has room for 16 chunks of 64 tokens; the state behind them is that of the 16th."""

    def recur(self, layer: StateLayer, inputs: Tensors, before: State) -> tuple[Tensor, State]:
        output, new = super().recur(layer, inputs, before)
        if output.shape[0] > 1024:
            names = {name for name, value in inputs.items() if value.shape[:1] == output.shape[:1]}
            first = {n: v[:1024] if n in names else v for n, v in inputs.items()}
            _, new = super().recur(layer, first, before)
        return output, new


class TailOfLongPrompts(SixteenChunks):
    """A prompt behind 512 tokens that is no multiple of 64 loses the tokens of its last chunk."""

    def recur(self, layer: StateLayer, inputs: Tensors, before: State) -> tuple[Tensor, State]:
        output, new = ReferenceState.recur(self, layer, inputs, before)
        whole = output.shape[0] // 64 * 64
        if output.shape[0] > 512 and whole < output.shape[0]:
            output = output.clone()
            output[whole:] = output[whole - 1]
        return output, new


class ScanOfTwoLevels(SixteenChunks):
    """The scan over chunks has two levels of 32; chunks behind 2,048 tokens begin from nothing."""

    def recur(self, layer: StateLayer, inputs: Tensors, before: State) -> tuple[Tensor, State]:
        output, new = ReferenceState.recur(self, layer, inputs, before)
        if output.shape[0] > 2048:
            names = {name for name, value in inputs.items() if value.shape[:1] == output.shape[:1]}
            rest = {n: v[2048:] if n in names else v for n, v in inputs.items()}
            empty = {name: torch.zeros_like(value) for name, value in before.items()}
            late, new = ReferenceState.recur(self, layer, rest, empty)
            output = torch.cat([output[:2048], late])
        return output, new


class SixteenRows(ReferenceState):
    """A batch has 16 rows at most."""

    most = 16

    def is_active(self, row: Row) -> bool:
        return super().is_active(row) and row.position < self.most


class SixtyFourRows(SixteenRows):
    """A batch has 64 rows at most."""

    most = 64


class SlotsInSevenBits(ReferenceState):
    """Slots are kept in seven bits."""

    def plan(self, batch: StateBatch) -> list[Row]:
        slots = torch.where(batch.slots < 0, batch.slots, batch.slots % 128)
        return super().plan(evolve(batch, slots=slots))


MUTANTS = (
    mutant("conv-four-taps", FourTaps, Level.NUMERICS, "short_conv"),
    mutant("conv-eight-taps", EightTaps, Level.NUMERICS, "short_conv"),
    mutant("conv-short-state", ShortConvState, Level.NUMERICS, "short_conv"),
    mutant("channel-tile", ChannelTile, Level.NUMERICS, "short_conv"),
    mutant("column-tile", ColumnTile, Level.NUMERICS, "mamba2"),
    mutant("narrow-columns", NarrowColumns, Level.NUMERICS, "mamba1"),
    mutant("key-tile", KeyTile, Level.NUMERICS, "gated_delta"),
    mutant("sixteen-chunks", SixteenChunks, Level.NUMERICS, "mamba2"),
    mutant("tail-of-long-prompts", TailOfLongPrompts, Level.NUMERICS, "gated_delta"),
    mutant("scan-of-two-levels", ScanOfTwoLevels, Level.NUMERICS, "mamba1"),
    mutant("sixteen-rows", SixteenRows, Level.HOSTILE, "short_conv"),
    mutant("sixty-four-rows", SixtyFourRows, Level.HOSTILE, "mamba1"),
    mutant("slots-in-seven-bits", SlotsInSevenBits, Level.HOSTILE, "short_conv"),
)
