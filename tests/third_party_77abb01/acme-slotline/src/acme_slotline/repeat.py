"""Prompt lookup by the newest token: proposes what followed it the last time."""

from __future__ import annotations

import torch
from attrs import define, field

from slotline.registry.contracts import Draft, DraftBatch, DrafterContext


@define
class _Memory:
    """What a row has said: its tokens so far, and for each token the place after its last one but the newest."""

    tokens: list[int] = field(factory=list)
    after: dict[int, int] = field(factory=dict)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            if self.tokens:
                self.after[self.tokens[-1]] = len(self.tokens)
            self.tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        place = self.after.get(self.tokens[-1]) if self.tokens else None
        return [] if place is None else self.tokens[place : place + count]


class RepeatDrafter:
    """Reads each accepted token once."""

    def __init__(self, context: DrafterContext) -> None:
        self._count = context.num_tokens
        self._rows: dict[int, _Memory] = {}

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        self._rows[row] = _Memory()

    def propose(self, batch: DraftBatch) -> Draft:
        drafts = [
            self._draft(row, batch.token_table[row, :length])
            for row, length in zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)
        ]
        token_ids = torch.tensor(drafts, dtype=torch.int64).reshape(len(drafts), self._count)
        return Draft(token_ids=token_ids.to(batch.last_token_ids.device))

    def _draft(self, row: int, tokens: torch.Tensor) -> list[int]:
        memory = self._rows[row]
        memory.extend(tokens[len(memory.tokens) :].tolist())
        found = memory.continuation(self._count)
        return found + [-1] * (self._count - len(found))

    def release(self, row: int) -> None:
        del self._rows[row]
