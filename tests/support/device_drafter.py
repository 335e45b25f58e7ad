"""A drafter for tests that needs nothing of the host: it knows what will come, and is wrong where a table says so."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import evolve

from slotline.registry import Descriptor, Kind, Max, Set
from slotline.registry.contracts import Draft, DraftBatch, DrafterCapabilities, DrafterContext


class Foreseeing:
    """Reads rows, newest tokens and positions of a batch, no more.

    Attributes:
        texts: by prompt, what a request's whole text will be.
        right: how many of a hundred drafts are.
    """

    descriptor = Descriptor(
        kind=Kind.DRAFTER,
        name="foreseeing",
        factory="",
        capabilities=DrafterCapabilities(devices=Set(None), max_tokens=Max(), on_device=True),
    )
    texts: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    right: ClassVar[int] = 70

    def __init__(self, context: DrafterContext) -> None:
        self.count, self.vocab_size = context.num_tokens, context.vocab_size
        shape = (context.max_requests, context.max_model_len + context.num_tokens)
        self.table = torch.zeros(shape, dtype=torch.int64, device=context.device)
        self.wrong = torch.randint(100, shape, generator=torch.Generator().manual_seed(5)).to(context.device)

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Look the request's text up."""
        text = self.texts.get(tuple(prompt_token_ids), [])
        self.table[row] = 1
        self.table[row, : len(text)] = torch.tensor(text, dtype=torch.int64, device=self.table.device)

    def release(self, row: int) -> None:
        """Its row's text is of no more use."""
        self.table[row] = 2

    def propose(self, batch: DraftBatch) -> Draft:
        """What comes behind the newest token, now and then one more than that, or no token at all."""
        device = self.table.device
        places = batch.positions[:, None] + torch.arange(1, 1 + self.count, device=device)
        rows = batch.rows.to(device, non_blocking=True)[:, None]
        said, luck = self.table[rows, places], self.wrong[rows, places]
        said = torch.where(luck < self.right, said, (said + 1) % self.vocab_size)
        return Draft(token_ids=said.masked_fill(luck == 99, -1))


class Undecided(Foreseeing):
    """Says that it proposes on the device, and that it reads the text on the host."""

    descriptor = evolve(
        Foreseeing.descriptor, capabilities=evolve(Foreseeing.descriptor.capabilities, needs_history=True)
    )
