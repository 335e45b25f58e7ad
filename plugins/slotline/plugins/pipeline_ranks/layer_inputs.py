"""Inputs of layers that a drafter reads, on their way through the stages to the last rank, which proposes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slotline.plugins.pipeline_ranks.links import receive_into
from slotline.registry.contracts import Communicator, Stage


class LayerInputs:
    """Inputs of chosen layers, beside the hidden states that a stage sends.

    Args:
        link: joins the pipeline's ranks.
        layer_ids: the layers, in the order in which the drafter reads them.
        stages: of the pipeline.
        like: [most tokens of a step, hidden_size], as hidden states are.
    """

    def __init__(
        self, link: Communicator, layer_ids: Sequence[int], stages: Sequence[Stage], like: torch.Tensor
    ) -> None:
        own, self._width = stages[link.rank], like.shape[1]
        self._link, self._is_last = link, link.rank == link.size - 1
        self._here = [index for index in layer_ids if index < own.end_layer or self._is_last]
        before = [index for index in self._here if index < own.first_layer]
        self._columns = [(index in before, index) for index in self._here]
        self._before = before
        self._received = like.new_zeros(len(like), len(before) * self._width)

    def receive(self, count: int) -> None:
        """Receive what the stages before have of `count` tokens."""
        if self._before:
            receive_into(self._received[:count], self._link, self._link.rank - 1)

    def joined(self, own: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
        """Return the inputs of all layers up to this stage's last one, [num_tokens, layers * hidden_size].

        Args:
            own: [num_tokens, own layers * hidden_size]. None if the stage has none of the layers.
        """
        if not self._here:
            return None
        parts = {True: iter(self._received[:num_tokens].split(self._width, 1))}
        parts[False] = iter(() if own is None else own.split(self._width, 1))
        return torch.cat([next(parts[is_before]) for is_before, _ in self._columns], 1)

    def send(self, joined: torch.Tensor | None, count: int) -> None:
        """Send the first `count` tokens to the next stage."""
        if joined is not None:
            self._link.send(joined[:count].contiguous(), self._link.rank + 1)
