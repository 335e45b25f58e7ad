"""Logits processors that are wrong about what the sampler does for them, or about companions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.registry.contracts import Companion, LogitsBatch, LogitsProcessorContext
from slotline.testing.reference.logits_processor import Contrast, SampledFloor

Params = Mapping[str, Any]

# --- floors


class PositiveFloor(SampledFloor):
    def floor(self, params: Params) -> float:
        return -super().floor(params)

    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        self.floors[row] = self.floor(params) * self.scale(params)
        return bool(self.floors[row] < float("inf"))


class FloorOfRatios(SampledFloor):
    """Gives a ratio of probabilities where its logarithm is asked for."""

    def floor(self, params: Params) -> float:
        return -float(torch.tensor(super().floor(params)).exp())


class ForgetsTemperature(SampledFloor):
    def scale(self, params: Params) -> float:
        return 1.0


class FloorForAll(SampledFloor):
    """Every request gets the floor of the last one that had any."""

    last = -float("inf")

    def floor(self, params: Params) -> float:
        own = super().floor(params)
        self.last = own if own > -float("inf") else self.last
        return self.last


# --- companions


class NoPrompt(Contrast):
    def companion(self, params: Params, prompt_token_ids: list[int]) -> Companion | None:
        return super().companion(params, prompt_token_ids[:0])


class PairsAll(Contrast):
    """Asks for a companion whether it is needed or not."""

    def companion(self, params: Params, prompt_token_ids: list[int]) -> Companion | None:
        return Companion(prompt=tuple(prompt_token_ids[-1:]), name="contrast_tokens", asked="contrast")


class BareTokens(Contrast):
    def companion(self, params: Params, prompt_token_ids: list[int]) -> Any:
        found = super().companion(params, prompt_token_ids)
        return None if found is None else found.prompt


class EatsThePrompt(Contrast):
    def companion(self, params: Params, prompt_token_ids: list[int]) -> Companion | None:
        found = super().companion(params, prompt_token_ids)
        del prompt_token_ids[:-1]
        return found


class FirstCompanionForAll(Contrast):
    def others(self, batch: LogitsBatch) -> torch.Tensor:
        return super().others(batch)[:1].expand(len(batch.rows), -1)


class CompanionsByRow(Contrast):
    """Takes the companions' logits in the order of rows."""

    def others(self, batch: LogitsBatch) -> torch.Tensor:
        order = torch.from_numpy(batch.rows.argsort(kind="stable").argsort(kind="stable"))
        return super().others(batch)[order]


class ChangesTheCompanion(Contrast):
    def others(self, batch: LogitsBatch) -> torch.Tensor:
        others = super().others(batch)
        return others.sub_(others.logsumexp(dim=1, keepdim=True))


class KeepsTheCompanion(Contrast):
    """Takes the companion's logits of a row's first step for all its steps."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.first: dict[int, torch.Tensor] = {}

    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        self.first.pop(row, None)
        return super().admit(row, params, prompt_token_ids)

    def others(self, batch: LogitsBatch) -> torch.Tensor:
        others = super().others(batch)
        return torch.stack([self.first.setdefault(row, others[i]) for i, row in enumerate(batch.rows.tolist())])
