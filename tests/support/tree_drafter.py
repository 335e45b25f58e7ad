"""A drafter for tests that declares trees; tests put another one in its place."""

from __future__ import annotations

import torch

from slotline.registry import Descriptor, Flag, Kind, Max, Set
from slotline.registry.contracts import Draft, DraftBatch, DrafterCapabilities, DrafterContext


class Tree:
    """Two guesses for each place: the newest token again, and the one above it."""

    descriptor = Descriptor(
        kind=Kind.DRAFTER,
        name="tree",
        factory="",
        capabilities=DrafterCapabilities(
            devices=Set(None), max_tokens=Max(), tree=Flag(True), request_trees=Flag(True)
        ),
    )

    def __init__(self, context: DrafterContext) -> None:
        self.vocab_size = context.vocab_size

    def admit(self, row: int, prompt_token_ids: list[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def propose(self, batch: DraftBatch) -> Draft:
        last = batch.last_token_ids
        return Draft(token_ids=torch.stack([last, (last + 1) % self.vocab_size], 1), parents=torch.tensor([-1, -1]))
