"""Step extensions: one that limits the tokens of each request, and one that has every method and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.registry.contracts import ExtensionCapabilities, ExtensionContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import IntegrityError, RequestError

Int = npt.NDArray[np.int64]
FIRST = 24
"""Tokens of a request's first steps."""


class SlowStart:
    """At most `FIRST` tokens of a request in its first step, one more in each later one, and a ban of token 7."""

    def __init__(self, context: ExtensionContext) -> None:
        self.context = context
        self.steps = np.zeros(context.max_requests, np.int64)
        self.held = np.zeros(context.max_requests, bool)

    def validate(self, request: Any) -> None:
        first = (request.params.extra_args or {}).get("slow_start", FIRST)
        if not isinstance(first, int) or first < 1:
            raise RequestError(f"slow_start={first!r} is not allowed", fix="give a number of tokens from 1")

    def admit(self, request: Any) -> None:
        self.steps[request.row], self.held[request.row] = 0, True

    def release(self, row: int) -> None:
        self.steps[row], self.held[row] = 0, False

    def limit_tokens(self, rows: Int, counts: Int) -> Int:
        self.steps[rows] += 1
        return np.minimum(counts, FIRST + self.steps[rows])

    def process_logits(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        token = torch.tensor([7 % logits.shape[1]], device=logits.device)
        return logits.index_fill(1, token, -torch.inf) if len(inputs.logits_rows) else logits

    def check(self) -> None:
        if self.steps[~self.held].any():
            raise IntegrityError("a row without a request has steps")


class Everywhere(SlowStart):
    """The same with every other method."""

    def before_step(self, scheduled: Any) -> Any:
        return scheduled

    def prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def plan(self, inputs: Any) -> None:
        """Plan nothing."""

    def forward_kwargs(self, inputs: Any) -> Mapping[str, Any]:
        return {}

    def after_sample(self, pending: Any) -> None:
        """Look at nothing."""

    def commit(self, output: Any) -> None:
        """Look at nothing."""


descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="slow_start",
    capabilities=ExtensionCapabilities(parameters=("slow_start",), provides=("slow_start",), excludes=("drafts",)),
    factory=SlowStart,
    summary="fewer tokens in a request's first steps",
)

everywhere = Descriptor(
    kind=Kind.EXTENSION,
    name="slow_everywhere",
    capabilities=ExtensionCapabilities(excludes=("drafts", "graphs")),
    factory=Everywhere,
    summary="every method of a step",
)
