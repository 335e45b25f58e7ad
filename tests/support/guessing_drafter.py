"""A drafter for tests that draws each token from a distribution that it gives."""

from __future__ import annotations

import torch

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts import Draft, DraftBatch, DrafterCapabilities, DrafterContext
from slotline.registry.descriptor import Descriptor, Kind


class Guesser:
    """Draws uniformly."""

    descriptor = Descriptor(
        kind=Kind.DRAFTER,
        name="guesser",
        capabilities=DrafterCapabilities(devices=Set(None), max_tokens=Max(), probabilities=Flag(True)),
        factory=None,
    )

    def __init__(self, context: DrafterContext) -> None:
        self.vocab_size, self.num_tokens = context.vocab_size, context.num_tokens

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Nothing is kept."""

    def release(self, row: int) -> None:
        """Nothing is kept."""

    def propose(self, batch: DraftBatch) -> Draft:
        """Uniform tokens with their probabilities."""
        shape = (len(batch.rows), self.num_tokens)
        even = torch.full((*shape, self.vocab_size), 1 / self.vocab_size)
        return Draft(token_ids=torch.randint(self.vocab_size, shape), probabilities=even)
