"""Medusa (Cai et al. 2024, section 2.1): the most likely token of each head, as a chain."""

from __future__ import annotations

from pathlib import Path

import torch

from slotline.proposers.medusa.heads import MedusaHeads, read_heads
from slotline.registry.contracts import Draft, DraftBatch, DrafterContext
from slotline.registry.errors import ConfigError


class MedusaDrafter:
    """Implements `Drafter`. Keeps nothing between steps; all heads run as one batch of matrix products.

    Raises:
        ConfigError: without a folder, or if more tokens are asked for than there are heads.
        ModelError: if the folder does not hold heads for this model.
    """

    def __init__(self, context: DrafterContext) -> None:
        if context.path is None:
            raise ConfigError("drafter medusa has no heads", fix="set drafter.path to a folder with Medusa heads")
        heads: MedusaHeads = read_heads(Path(context.path), context.hidden_size, context.vocab_size)
        if context.num_tokens > heads.num_heads:
            raise ConfigError(
                f"drafter.tokens = {context.num_tokens}: there are {heads.num_heads} heads in {context.path!r}",
                fix=f"set drafter.tokens to {heads.num_heads} or less",
            )
        dtype: torch.dtype = getattr(torch, context.dtype)
        self._heads = heads.first(context.num_tokens).to(context.device, dtype)
        self._compute_logits = context.compute_logits
        if heads.projections is None and self._compute_logits is None:
            raise ConfigError(
                f"the heads in {context.path!r} share the model's output projection, and there is no model",
                fix="use them in an engine, or heads with projections of their own",
            )

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Nothing to prepare."""

    def propose(self, batch: DraftBatch) -> Draft:
        """Head i predicts the token i + 1 places behind the newest one, from the state that gave the newest one."""
        assert batch.hidden_states is not None  # declared as a need
        states = self._heads.states(batch.hidden_states)  # [num_tokens, n, hidden_size]
        if self._heads.projections is not None:
            logits = torch.bmm(states, self._heads.projections.transpose(1, 2))
        else:
            assert self._compute_logits is not None
            logits = self._compute_logits(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        return Draft(token_ids=logits.argmax(-1).T.contiguous())

    def release(self, row: int) -> None:
        """Nothing to forget."""
