"""The drafter that leaves drafting to the grammars: jump-forward decoding (Zheng et al. 2024, SGLang, section 4)."""

from __future__ import annotations

import torch

from slotline.registry.contracts import Draft, DraftBatch, DrafterContext


class GrammarDrafter:
    """Drafter without proposals.

    With any drafter the core drafts forced tokens of grammars, and this one adds no guesses.
    """

    def __init__(self, context: DrafterContext) -> None: ...

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """See the contract."""

    def propose(self, batch: DraftBatch) -> Draft:
        """See the contract."""
        return Draft(token_ids=torch.full((len(batch.rows), 1), -1))

    def release(self, row: int) -> None:
        """See the contract."""
