"""Rollback to an accepted draft: the data that a layer keeps of the requests that a step verifies.

The state before a request's tokens and the operands of the recurrence are kept. To go back, the accepted tokens are
computed again, as one chunk padded with zeros. This is one matrix product for all requests. Storing the state after
each token would cost memory traffic in every step, even if no draft is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from slotline.backends.torch_state.batches import Part, Slots
from slotline.backends.torch_state.recurrences import RECURRENCES, own_inputs
from slotline.registry.contracts.state import StateBatch, StateLayer

Tensors = Mapping[str, Tensor]


@frozen(kw_only=True, eq=False)
class Trail:
    """One layer's verified requests in one step.

    Attributes:
        kind, facts: of the layer.
        batch: the step's.
        rows: [n] int64, positions of the requests in the batch.
        before: [n, *shape] float32, the states before the step.
        pieces: [n, Q, ...], operands of the layer's recurrence, zeros after a request's last token.
        parameters: the layer's other inputs.
    """

    kind: str
    facts: Mapping[str, Any]
    batch: StateBatch
    rows: Tensor
    before: Tensor
    pieces: tuple[Tensor, ...]
    parameters: Tensors

    def go_back(self, state: Tensor, slots: Tensor, accepted: Tensor, *, on_host: bool) -> None:
        """Make the states those after `accepted` tokens, [num_requests] of the batch as `slots` are."""
        index: Tensor | None = None
        rows = self.rows
        if on_host:
            index = (slots.index_select(0, rows) >= 0).nonzero().squeeze(1)
            if not len(index):
                return
            rows = rows.index_select(0, index)
        batch = evolve(self.batch, slots=slots, has_initial_state=torch.ones_like(slots, dtype=torch.bool))
        counts = accepted.index_select(0, rows).long().clamp(0, self.pieces[0].shape[1])  # of padding, anything
        before, *pieces = (_some(values, index) for values in (self.before, *self.pieces))
        Slots(batch, rows, on_host=on_host).write(state, self._after(counts, before, pieces))

    def _after(self, counts: Tensor, before: Tensor, pieces: list[Tensor]) -> Tensor:
        """Return the states after the first `counts` [n] of the tokens."""
        if self.kind == "short_conv":
            line = torch.cat([before.mT, pieces[0]], dim=1)  # [n, W - 1 + Q, C]
            kept = before.shape[2]
            places = counts[:, None] + torch.arange(kept, device=counts.device)  # [n, W - 1]
            return line.gather(1, places[:, :, None].expand(-1, -1, line.shape[2])).mT
        stays = torch.arange(pieces[0].shape[1], device=counts.device) < counts[:, None]  # [n, Q]
        masked = tuple(torch.where(stays.view(*stays.shape, *[1] * (piece.ndim - 2)), piece, 0.0) for piece in pieces)
        _, after = RECURRENCES[self.kind].chunk(self.facts, self.parameters, masked, before.clone())
        return after


def trail_of(layer: StateLayer, inputs: Tensors, state: Tensors, batch: StateBatch, part: Part) -> Trail:
    """Return the data to keep of a layer before its states change."""
    (tensor,) = state.values()
    own = own_inputs(layer, inputs, part.tokens)
    if layer.state_kind == "short_conv":
        pieces: tuple[Tensor, ...] = (own["x"].float(),)
    else:
        pieces = RECURRENCES[layer.state_kind].pieces(layer.facts, own)
    return Trail(
        kind=layer.state_kind,
        facts=layer.facts,
        batch=batch,
        rows=part.rows,
        before=part.slots.read(tensor).clone(),
        pieces=tuple(part.spread(piece) for piece in pieces),
        # a copy: a model may make it anew in each forward, in memory that a graph uses again before the commit
        parameters={name: own[name].clone() for name in ("A",) if name in own},
    )


def _some(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values.index_select(0, index)
