"""Logits processors that are wrong about parameters, or about the form and the values of logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.core import SamplingParams
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError
from slotline.testing.reference.logits_processor import Floor, RecentPenalty

Params = Mapping[str, Any]

# --- parameters


class ValidatesNothing(RecentPenalty):
    def validate(self, params: Params) -> None: ...


class RefusesStrangers(RecentPenalty):
    def validate(self, params: Params) -> None:
        super().validate(params)
        own = {*SamplingParams().as_mapping(), "recent_penalty", "recent_window", "never"}
        for name in params:
            if name not in own:
                raise RequestError(f"{name} is unknown")


class RaisesValueError(RecentPenalty):
    def validate(self, params: Params) -> None:
        try:
            super().validate(params)
        except RequestError as error:
            raise ValueError(str(error)) from None


class NamesNoParameter(RecentPenalty):
    def validate(self, params: Params) -> None:
        try:
            super().validate(params)
        except RequestError as error:
            raise RequestError("something is not allowed") from error


class TakesParametersAway(RecentPenalty):
    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        answer = super().admit(row, params, prompt_token_ids)
        params.pop("never", None)  # type: ignore[attr-defined]
        return answer


class AnswersNothing(RecentPenalty):
    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        super().admit(row, params, prompt_token_ids)
        return None  # type: ignore[return-value]


class SeesNoWork(RecentPenalty):
    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        return super().admit(row, params, prompt_token_ids) and "recent_penalty" in params


class HoldsOnToThePrompt(RecentPenalty):
    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.prompts: dict[int, list[int]] = {}

    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        self.prompts[row] = prompt_token_ids
        return super().admit(row, params, prompt_token_ids)

    def known(self, batch: LogitsBatch, entry: int) -> list[int]:
        prompt = self.prompts[int(batch.rows[entry])]
        return prompt + super().known(batch, entry)[len(prompt) :]


# --- logits


class ReturnsFloat64(RecentPenalty):
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        return super().apply(logits, batch).double()


class ReturnsNothing(RecentPenalty):
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        super().apply(logits, batch)
        return None  # type: ignore[return-value]


class LiftsBans(RecentPenalty):
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        return super().apply(logits, batch).clamp(min=-1e9)


class RandomPenalty(RecentPenalty):
    def penalise(self, logits: torch.Tensor, recent: list[int], penalty: float) -> None:
        super().penalise(logits, recent, penalty + float(torch.rand(())))


class OneBufferForAll(RecentPenalty):
    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.buffer = torch.empty(64, context.vocab_size, device=context.device)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        view = self.buffer[: len(logits)]
        view.copy_(super().apply(logits, batch))
        return view


class OverflowingSoftmax(Floor):
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        weights = super().apply(logits, batch).exp()  # without the maximum taken off
        return (weights / weights.sum(dim=1, keepdim=True)).log()


class BestOfTheBatch(Floor):
    def below(self, logits: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
        return logits < logits.amax() - floors


class ClampsTheBest(Floor):
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        return super().apply(logits, batch).minimum(logits.amax(dim=1, keepdim=True) - 1.0)


class KeepsTheLastOfTies(Floor):
    def below(self, logits: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
        best = logits.shape[1] - 1 - logits.flip(1).argmax(dim=1, keepdim=True)
        tied = logits == logits.amax(dim=1, keepdim=True)
        return super().below(logits, floors) | (tied & (torch.arange(logits.shape[1], device=logits.device) != best))


# --- precision, and the ends of the vocabulary


class ComputesInBfloat16(RecentPenalty):
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        return super().apply(logits.bfloat16(), batch).float()


class ComputesInHalf(RecentPenalty):
    def penalise(self, logits: torch.Tensor, recent: list[int], penalty: float) -> None:
        whole = logits.half()
        super().penalise(whole, recent, penalty)
        logits[:] = whole.float()


class ForgetsTokenZero(RecentPenalty):
    def known(self, batch: LogitsBatch, entry: int) -> list[int]:
        return [token or 1 for token in super().known(batch, entry)]


class ForgetsTheLastToken(RecentPenalty):
    def known(self, batch: LogitsBatch, entry: int) -> list[int]:
        return [min(token, self.vocab_size - 2) for token in super().known(batch, entry)]


class WindowTooShort(RecentPenalty):
    def history(self, batch: LogitsBatch, entry: int) -> list[int]:
        return super().history(batch, entry)[1:]


class MultipliesAll(RecentPenalty):
    def penalise(self, logits: torch.Tensor, recent: list[int], penalty: float) -> None:
        tokens = torch.tensor(sorted(set(recent)), dtype=torch.int64, device=logits.device)
        logits[tokens] = logits[tokens] / penalty
