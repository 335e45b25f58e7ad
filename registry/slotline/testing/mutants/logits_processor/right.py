"""Right logits processors that differ from the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.testing.reference.logits_processor import RecentPenalty

Params = Mapping[str, Any]


class AllRowsAtOnce(RecentPenalty):
    """The same rule on [num_logits, vocab_size] at once, without writing to the given logits."""

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        recent = np.zeros(tuple(logits.shape), bool)
        banned = np.zeros(tuple(logits.shape), bool)
        penalties = []
        for entry, row in enumerate(batch.rows.tolist()):
            penalty, window, never = self.rows[row]
            recent[entry, self.history(batch, entry)[-window:]] = True
            banned[entry, never] = True
            penalties.append(penalty)
        factor = torch.tensor(penalties, device=logits.device)[:, None]
        penalised = torch.where(logits > 0, logits / factor, logits * factor)
        changed = torch.where(torch.from_numpy(recent).to(logits.device), penalised, logits)
        return changed.masked_fill(torch.from_numpy(banned).to(logits.device), -torch.inf)


class NeverThirteen:
    """Bans one token in every request, with neither parameters nor state."""

    def __init__(self, context: LogitsProcessorContext) -> None: ...

    def validate(self, params: Params) -> None: ...

    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        return True

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        logits[:, 13] = -torch.inf
        return logits

    def release(self, row: int) -> None: ...
