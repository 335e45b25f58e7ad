"""Bugs in the formulas."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from slotline.registry.contracts.state import StateLayer
from slotline.testing.check import Level
from slotline.testing.mutants.state.common import mutant
from slotline.testing.reference.state import ReferenceState
from slotline.testing.reference.state.recurrences import Facts, State, Tensors

CHUNK = 64


class WindowLate(ReferenceState):
    """The convolution sees one token too far back: its window ends before the newest."""

    def convolve(self, joined: Tensor, weight: Tensor) -> Tensor:
        return super().convolve(joined, weight.roll(-1, dims=1))


class WeightReversed(ReferenceState):
    """The convolution's weight is applied newest token first."""

    def convolve(self, joined: Tensor, weight: Tensor) -> Tensor:
        return super().convolve(joined, weight.flip(1))


class ConvStateReversed(ReferenceState):
    """The convolution's state is saved newest first."""

    def last_columns(self, joined: Tensor, width: int) -> Tensor:
        return super().last_columns(joined, width).flip(1)


class ConvStateOnlyOfLong(ReferenceState):
    """The convolution's state is saved only if a batch brings at least as many tokens as it holds."""

    def short_conv(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        output, new = super().short_conv(facts, inputs, state)
        return output, new if inputs["x"].shape[0] >= facts["width"] - 1 else state


class ConvStateWithoutHistory(ReferenceState):
    """The convolution's state is made only of the new tokens. If they are few, the rest is zeros."""

    def short_conv(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        output, _ = super().short_conv(facts, inputs, state)
        padded = F.pad(inputs["x"].T, (facts["width"] - 1, 0))
        return output, {"conv": self.last_columns(padded, facts["width"])}


class AlwaysActivated(ReferenceState):
    """The convolution applies its activation though the layer has none."""

    def activate(self, facts: Facts, value: Tensor) -> Tensor:
        return F.silu(value)


class NoTimeBias(ReferenceState):
    """dt_bias is ignored."""

    def biased(self, inputs: Tensors) -> Tensor:
        return inputs["dt"]


class NoSoftplus(ReferenceState):
    """The time step is not made positive."""

    def time_step(self, facts: Facts, inputs: Tensors) -> Tensor:
        return super().time_step({**facts, "dt_softplus": False}, inputs)


class NoTimeLimit(ReferenceState):
    """dt_limit is ignored."""

    def time_step(self, facts: Facts, inputs: Tensors) -> Tensor:
        return super().time_step({name: value for name, value in facts.items() if name != "dt_limit"}, inputs)


class DecayGrows(ReferenceState):
    """The sign of the decay is wrong."""

    def decay(self, logarithm: Tensor) -> Tensor:
        return torch.exp(-logarithm)


class GroupsInterleaved(ReferenceState):
    """Head i reads group i modulo the number of groups, where neighbours share one."""

    def per_head(self, grouped: Tensor, num_heads: int) -> Tensor:
        return grouped.repeat(1, num_heads // grouped.shape[1], 1)


class NoSkip(ReferenceState):
    """The skip connection D is left out."""

    def finish(self, output: Tensor, inputs: Tensors, skip: Tensor | None) -> Tensor:
        return super().finish(output, inputs, None)


class GateBeforeSkip(ReferenceState):
    """The gate is applied before the skip connection."""

    def finish(self, output: Tensor, inputs: Tensors, skip: Tensor | None) -> Tensor:
        output = super().finish(output, inputs, None)
        return output if skip is None else output + skip * inputs["x"]


class GateRequired(ReferenceState):
    """Optional inputs are taken for granted."""

    def finish(self, output: Tensor, inputs: Tensors, skip: Tensor | None) -> Tensor:
        return super().finish(output, {"z": inputs["z"], **inputs}, skip)


class KeysNotUnit(ReferenceState):
    """Queries and keys are not normalised."""

    def unit(self, value: Tensor) -> Tensor:
        return value


class NoScale(ReferenceState):
    """The layer's scale is ignored in favour of the usual one."""

    def queries_and_keys(self, facts: Facts, inputs: Tensors) -> tuple[Tensor, Tensor]:
        return super().queries_and_keys({**facts, "scale": facts["head_size_k"] ** -0.5}, inputs)


class PredictsBeforeDecay(ReferenceState):
    """The delta rule subtracts what the state predicted before it decayed."""

    def gated_delta(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        late = {**inputs, "g": torch.cat([inputs["g"][1:], torch.zeros_like(inputs["g"][:1])])}
        output, new = super().gated_delta(facts, late, state)
        return output, new


class BetaOnValuesOnly(ReferenceState):
    """beta scales the values but not what the state predicts."""

    def gated_delta(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        ones = torch.ones_like(inputs["beta"])
        return super().gated_delta(facts, {**inputs, "v": inputs["beta"][..., None] * inputs["v"], "beta": ones}, state)


class StateInBfloat16(ReferenceState):
    """A float32 state is rounded to bfloat16 whenever it is stored."""

    def store(self, state: Tensors, slot: int, new: Tensors) -> None:
        super().store(state, slot, {name: value.bfloat16() for name, value in new.items()})


class ChunksFromZero(ReferenceState):
    """Each chunk of 64 tokens of a prompt starts from the request's first state, not from the chunk before."""

    def recur(self, layer: StateLayer, inputs: Tensors, before: State) -> tuple[Tensor, State]:
        token_wise = {name for name in inputs if name in ("x", "dt", "B", "C", "z", "q", "k", "v", "g", "beta")}
        count = inputs["v" if "v" in inputs else "x"].shape[0]
        outputs, new = [], before
        for first in range(0, count, CHUNK):
            piece = {n: v[first : first + CHUNK] if n in token_wise else v for n, v in inputs.items()}
            output, new = super().recur(layer, piece, before)
            outputs.append(output)
        return torch.cat(outputs), new


class LastChunkPadded(ReferenceState):
    """A prompt longer than 64 tokens is padded to whole chunks, and the padding's decay ends up in the state."""

    def recur(self, layer: StateLayer, inputs: Tensors, before: State) -> tuple[Tensor, State]:
        output, new = super().recur(layer, inputs, before)
        missing = -output.shape[0] % CHUNK
        if output.shape[0] > CHUNK and missing:
            last = {n: v[-1:] for n, v in inputs.items() if n in ("x", "B", "C", "dt")}
            _, new = super().recur(layer, {**inputs, **last, "x": 0 * last["x"], "z": last["x"]}, new)
        return output, new


class InputsReused(ReferenceState):
    """Time steps are computed in the buffer of dt."""

    def inputs_of(self, layer: StateLayer, inputs: Tensors, row: object) -> dict[str, Tensor]:
        inputs["dt"].add_(1.0).sub_(0.5)
        return super().inputs_of(layer, inputs, row)  # type: ignore[arg-type]


MUTANTS = (
    mutant("conv-window-late", WindowLate, Level.NUMERICS, "short_conv"),
    mutant("conv-weight-reversed", WeightReversed, Level.NUMERICS, "short_conv"),
    mutant("conv-state-reversed", ConvStateReversed, Level.NUMERICS, "short_conv"),
    mutant("conv-state-only-of-long-prompts", ConvStateOnlyOfLong, Level.NUMERICS, "short_conv"),
    mutant("conv-state-without-history", ConvStateWithoutHistory, Level.NUMERICS, "short_conv"),
    mutant("conv-always-activated", AlwaysActivated, Level.NUMERICS, "short_conv"),
    mutant("time-bias-missing", NoTimeBias, Level.NUMERICS, "mamba1"),
    mutant("softplus-missing", NoSoftplus, Level.NUMERICS, "mamba2"),
    mutant("time-limit-ignored", NoTimeLimit, Level.NUMERICS, "mamba2"),
    mutant("decay-grows", DecayGrows, Level.NUMERICS, "gated_delta"),
    mutant("groups-interleaved", GroupsInterleaved, Level.NUMERICS, "mamba2"),
    mutant("key-heads-interleaved", GroupsInterleaved, Level.NUMERICS, "gated_delta"),
    mutant("skip-missing", NoSkip, Level.NUMERICS, "mamba1"),
    mutant("gate-before-skip", GateBeforeSkip, Level.NUMERICS, "mamba2"),
    mutant("gate-required", GateRequired, Level.NUMERICS, "mamba1"),
    mutant("keys-not-unit", KeysNotUnit, Level.NUMERICS, "gated_delta"),
    mutant("scale-ignored", NoScale, Level.NUMERICS, "gated_delta"),
    mutant("delta-predicts-before-decay", PredictsBeforeDecay, Level.NUMERICS, "gated_delta"),
    mutant("beta-on-values-only", BetaOnValuesOnly, Level.NUMERICS, "gated_delta"),
    mutant("state-in-bfloat16", StateInBfloat16, Level.NUMERICS, "mamba1"),
    mutant("delta-state-in-bfloat16", StateInBfloat16, Level.NUMERICS, "gated_delta"),
    mutant("inputs-changed", InputsReused, Level.NUMERICS, "mamba2"),
    mutant("chunk-boundary-forgets", ChunksFromZero, Level.NUMERICS, "mamba2"),
    mutant("delta-chunk-boundary-forgets", ChunksFromZero, Level.NUMERICS, "gated_delta"),
    mutant("chunk-padding-decays", LastChunkPadded, Level.NUMERICS, "mamba2"),
)
