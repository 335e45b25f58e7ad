"""What the engine, the scheduler and the runner ask of adapters, be they in slots or merged into the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.api.lora_request import LoRARequest
from slotline.core.batch.adapter_usage import AdapterUse
from slotline.core.batch.request import Request


class AdapterManager(Protocol):
    """The adapters of an engine; `adapters.Adapters` has the details of each method."""

    @property
    def numbers(self) -> set[int]:
        """The known adapters' numbers."""
        ...

    def named(self, name: str) -> LoRARequest:
        """The known adapter of a name."""
        ...

    def add(self, request: LoRARequest) -> object:
        """Know an adapter."""
        ...

    def remove(self, number: int) -> bool:
        """Forget an adapter; False if there is none of that number."""
        ...

    def pin(self, number: int) -> None:
        """Have an adapter keep its slot."""
        ...

    def enter(self, request: Request) -> None:
        """Check a new request's adapter."""
        ...

    def leave(self, request: Request) -> None:
        """The request has ended."""
        ...

    def acquire(self, request: Request) -> bool:
        """Give a request's adapter a slot; False if all are in use."""
        ...

    def activate(self, request: Request) -> None:
        """Bring an acquired adapter into its slot."""
        ...

    def release(self, request: Request) -> None:
        """The request has left the batch."""
        ...

    def recount(self, unfinished: Sequence[Request]) -> None:
        """Count users and holders again; rows and slots are as the unfinished requests say."""
        ...

    def reloaded(self) -> None:
        """The model's weights have been read again."""
        ...

    def check(self) -> None:
        """Raise IntegrityError unless everything agrees."""
        ...

    def use_by(self, rows: npt.NDArray[np.int64]) -> AdapterUse:
        """How many adapters in slots the rows have."""
        ...

    def plan(self, slots: torch.Tensor | None, single_slot: int | None = None) -> None:
        """Prepare a forward pass."""
        ...

    def plan_head(self, slots: torch.Tensor, indices: torch.Tensor, single_slot: int | None = None) -> None:
        """Prepare the output projection for some of the step's tokens."""
        ...
