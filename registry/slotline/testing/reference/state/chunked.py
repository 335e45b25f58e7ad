"""Second correct state backend, by chunks of tokens and with other arithmetic. It rolls back by replaying.

Sources: the chunked state-space dual form of Dao and Gu, arXiv 2405.21060, section 6, the WY form of the gated delta
rule of Yang and others, arXiv 2412.06464, section 3.2, the parallel scan of Blelloch in the form of Hillis and Steele.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slotline.registry.contracts.state import StateContext, StateLayer
from slotline.testing.reference.state.backend import ReferenceState, Row, descriptor_of
from slotline.testing.reference.state.recurrences import Facts, State, Tensors

CHUNK = 32


class ChunkedState(ReferenceState):
    """State backend with matrix products within a chunk and the recurrence between chunks."""

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        self.replays: dict[str, dict[int, tuple[Tensors, State]]] = {}  # inputs and state before, as `trails`

    def forward(self, layer: StateLayer, inputs: Tensors, state: Tensors, plan: list[Row]) -> Tensor:
        self.replays[layer.name] = {}
        return super().forward(layer, inputs, state, plan)

    def advance(self, layer: StateLayer, inputs: Tensors, before: State, row: Row) -> tuple[Tensor, State]:
        if row.num_tokens <= 1 + self.max_draft_tokens:
            kept = {name: value.clone() for name, value in inputs.items()}
            self.replays[layer.name][row.position] = (kept, {name: value.clone() for name, value in before.items()})
        return self.recur(layer, inputs, before)

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        for position, (slot, count) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
            if slot >= 0:
                inputs, before = self.replays[layer.name][position]
                first = self.inputs_of(layer, inputs, Row(0, 0, count, 0, True))
                self.store(state, slot, self.recur(layer, first, before)[1])

    def convolve(self, joined: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("ctw,cw->ct", joined.unfold(1, weight.shape[1], 1), weight)

    def scan(self, decay: Tensor, increment: Tensor, initial: Tensor) -> Tensor:
        """Combine spans of 1, 2, 4, ... tokens with the span before each."""
        decay = decay.expand_as(increment)
        span = 1
        while span < increment.shape[0]:
            earlier = decay[span:] * increment[:-span]
            increment = torch.cat([increment[:span], increment[span:] + earlier])
            decay = torch.cat([decay[:span], decay[span:] * decay[:-span]])
            span *= 2
        return increment + decay * initial

    def mamba2(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        d = self.time_step(facts, inputs)
        b, c = (self.per_head(inputs[name], facts["num_heads"]) for name in ("B", "C"))
        pieces = (d * inputs["A"], d[..., None] * inputs["x"], b, c)
        output, ssm = _by_chunks(_dual_chunk, pieces, state["ssm"])
        return self.finish(output, inputs, self.skip_of_heads(inputs)), {"ssm": ssm}

    def gated_delta(self, facts: Facts, inputs: Tensors, state: State) -> tuple[Tensor, State]:
        q, k = self.queries_and_keys(facts, inputs)
        pieces = (inputs["g"], q, k, inputs["v"], inputs["beta"][..., None])
        output, delta = _by_chunks(_delta_chunk, pieces, state["delta"])
        return output, {"delta": delta}


def _by_chunks(
    function: Callable[..., tuple[Tensor, Tensor]], pieces: tuple[Tensor, ...], state: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for first in range(0, pieces[0].shape[0], CHUNK):
        output, state = function(*(piece[first : first + CHUNK].transpose(0, 1) for piece in pieces), state)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs), state


def _decays(logarithm: Tensor) -> tuple[Tensor, Tensor]:
    """Return, from log decays [H, T], their running sum and the decay from token s to t [H, t, s], 0 for s > t."""
    total = logarithm.cumsum(1)
    pairs = (total[:, :, None] - total[:, None, :]).masked_fill(_above(total.shape[1], total.device), float("-inf"))
    return total, torch.exp(pairs)


def _above(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def _dual_chunk(logarithm: Tensor, x: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one chunk of the dual form. x [H, T, P] is scaled, b, c are [H, T, N], state is [H, P, N]."""
    total, decay = _decays(logarithm)
    within = (c @ b.mT * decay) @ x
    before = torch.exp(total)[..., None] * (c @ state.mT)
    to_end = torch.exp(total[:, -1:] - total)[..., None]
    return within + before, torch.exp(total[:, -1])[:, None, None] * state + (to_end * x).mT @ b


def _delta_chunk(
    logarithm: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one chunk of the delta rule. q, k [H, T, K], v [H, T, V], beta [H, T, 1], state [H, K, V]."""
    total, decay = _decays(logarithm)
    start = torch.exp(total)[..., None]
    system = (beta * (k @ k.mT) * decay).tril(-1)
    wanted = beta * (v - start * (k @ state))
    correction = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = start * (q @ state) + (q @ k.mT * decay) @ correction
    to_end = torch.exp(total[:, -1:] - total)[..., None]
    return output, torch.exp(total[:, -1])[:, None, None] * state + (to_end * k).mT @ correction


chunked_descriptor = descriptor_of("chunked_state", ChunkedState)
