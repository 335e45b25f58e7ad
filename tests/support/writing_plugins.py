"""A drafter and a logits processor that write into everything that they are shown."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import Draft, DrafterCapabilities, LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind


class Drafter:
    """Proposes the newest token again, and spoils the history."""

    def __init__(self, context: Any) -> None:
        self._tokens = context.num_tokens

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        prompt_token_ids.clear()

    def propose(self, batch: Any) -> Draft:
        draft = batch.last_token_ids[:, None].repeat(1, self._tokens)
        for tensor in (batch.token_table, batch.num_tokens, batch.rows, batch.last_token_ids, batch.positions):
            tensor.fill_(3)
        return Draft(token_ids=draft)

    def release(self, row: int) -> None:
        pass


class Processor:
    """Writes into the history of requests that ask for it."""

    def __init__(self, context: Any) -> None:
        pass

    def validate(self, params: Any) -> None:
        pass

    def admit(self, row: int, params: Any, prompt_token_ids: list[int]) -> bool:
        prompt_token_ids.clear()
        return bool((params.get("extra_args") or params).get("writes"))

    def apply(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        batch.rows[:] = 0
        batch.num_tokens[:] = 1
        batch.token_table[:] = 3
        return logits

    def release(self, row: int) -> None:
        pass


drafter = Descriptor(
    kind=Kind.DRAFTER,
    name="writing",
    capabilities=DrafterCapabilities(devices=Set(("cpu",)), needs_history=True),
    factory=Drafter,
)
processor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="writing",
    capabilities=LogitsProcessorCapabilities(parameters=("writes",), speculation=Flag(True)),
    factory=Processor,
)
