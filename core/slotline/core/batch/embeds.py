"""Embeddings that replace those of placeholder tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen


@frozen(eq=False)
class Embeds:
    """Embeddings that replace those of some of a step's tokens.

    Attributes:
        index: [n] int64 on the device, which of the step's tokens.
        values: [n, hidden_size] in the model's dtype.
    """

    index: torch.Tensor
    values: torch.Tensor

    def merged(self, embed: Callable[[torch.Tensor], torch.Tensor], input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [num_tokens, hidden_size] of a step with these values in their places."""
        return embed(input_ids).index_copy_(0, self.index, self.values)
