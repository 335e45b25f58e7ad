"""Embeddings of a step's items: where they go, and what cross-attention stores of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen


@frozen(eq=False)
class Embeds:
    """Embeddings that replace those of some of a step's tokens.

    Attributes:
        index: [n] int64 on the device, which of the step's tokens.
        values: [n, (1 + layer_embeds) * hidden_size] in the model's dtype, see `ModelFacts.layer_embeds`.
    """

    index: torch.Tensor
    values: torch.Tensor

    def merged(self, embed: Callable[[torch.Tensor], torch.Tensor], input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [num_tokens, hidden_size] of a step with these values in their places."""
        embeddings = embed(input_ids)
        return embeddings.index_copy_(0, self.index, self.values[:, : embeddings.shape[1]])

    def by_layer(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index, and what the first `count` layers add, [count, n, hidden_size]."""
        return self.index, self.values.unflatten(1, (1 + count, -1))[:, 1:].transpose(0, 1)


@frozen(eq=False)
class StepEmbeds:
    """Embeddings of a step, in `ModelInputs.extras`.

    Attributes:
        embeds: of its own tokens. None if they take none.
        states: [n, hidden_size], the encoder outputs whose keys cross-attention stores in this step, in batch order.
            None for none.
        following: returns those of the tokens that follow its tokens, for drafters that look one token ahead. None if
            they take none. The token after a request's last token of the step is among them if it belongs to an item
            of the step.
        offsets: [position_axes, num_padded_tokens] int64, on their way to the device. None if the model has one axis.
    """

    embeds: Embeds | None
    states: torch.Tensor | None
    following: Callable[[], Embeds | None]
    offsets: torch.Tensor | None = None
