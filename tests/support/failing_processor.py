"""A logits processor for tests that does what a request's `fail` says once the request has `fail_at` output tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsBatch, LogitsProcessorCapabilities, LogitsProcessorContext
from slotline.registry.descriptor import Descriptor, Kind


class Failing:
    """Right for requests whose `fail` is not due; also counts how often it is called.

    Cannot be built for engines of `unbuildable` requests.
    """

    unbuildable = 13

    descriptor = Descriptor(
        kind=Kind.LOGITS_PROCESSOR,
        name="failing",
        capabilities=LogitsProcessorCapabilities(
            parameters=("fail", "fail_at"), speculation=Flag(True), default=True, order=5
        ),
        factory=None,
    )

    def __init__(self, context: LogitsProcessorContext) -> None:
        if context.max_requests == self.unbuildable:
            raise KeyError("no such table")
        self.calls = 0
        self.asked: dict[int, tuple[str, int]] = {}
        self.released: list[int] = []

    def validate(self, params: Mapping[str, Any]) -> None:
        """Anything goes, but for a request that asks for a failure here."""
        if params.get("fail") == "validate":
            raise KeyError("no such table")

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Remember what to do."""
        if "fail" in params:
            self.asked[row] = (params["fail"], params.get("fail_at", 0))
        return "fail" in params

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Fail for the whole batch, or make one row unusable."""
        self.calls += 1
        for place, row in enumerate(batch.rows.tolist()):
            how, at = self.asked[row]
            output = int(batch.lengths[place] - batch.num_prompt_tokens[place])
            if output < at:
                continue
            if how == "raise":
                logits.fill_(-7.0)  # what was done to the others before must not stay
                raise ValueError(f"row {row} is wrong")
            if how == "shape":
                return logits[:, :-1]
            if how == "dtype":
                return logits.double()
            if how == "none":
                return None  # type: ignore[return-value]
            if how in ("nan", "inf", "ban"):
                logits[place] = {"nan": torch.nan, "inf": torch.inf, "ban": -torch.inf}[how]
        return logits

    def release(self, row: int) -> None:
        """Fail where that was asked for."""
        self.released.append(row)
        if self.asked.pop(row)[0] == "release":
            raise ValueError("cannot let go")
