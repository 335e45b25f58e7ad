"""Adapter manager protocol, as seen by the engine, the scheduler and the runner, for adapters in slots or merged."""

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
    """The adapters of an engine. `AdapterSlots` documents each method."""

    @property
    def numbers(self) -> set[int]:
        """Return the known adapters' numbers."""
        ...

    def named(self, name: str) -> LoRARequest:
        """Return the known adapter of a name."""
        ...

    def add(self, request: LoRARequest) -> object:
        """Register an adapter."""
        ...

    def remove(self, number: int) -> bool:
        """Forget an adapter. Return False if none has this number."""
        ...

    def pin(self, number: int) -> None:
        """Keep an adapter in its slot."""
        ...

    def enter(self, request: Request) -> None:
        """Check a new request's adapter."""
        ...

    def leave(self, request: Request) -> None:
        """Handle the end of a request."""
        ...

    def acquire(self, request: Request) -> bool:
        """Give a request's adapter a slot. Return False if all are in use."""
        ...

    def activate(self, request: Request) -> None:
        """Load an acquired adapter into its slot."""
        ...

    def release(self, request: Request) -> None:
        """Handle a request that has left the batch."""
        ...

    def recount(self, unfinished: Sequence[Request]) -> None:
        """Recount users and holders from the unfinished requests, whose rows and slots are correct."""
        ...

    def reloaded(self) -> None:
        """Handle a reload of the model's weights."""
        ...

    def check(self) -> None:
        """Raise IntegrityError unless slots, holders and rows agree."""
        ...

    def use_by(self, rows: npt.NDArray[np.int64]) -> AdapterUse:
        """Return how many adapters in slots the rows use."""
        ...

    def plan(self, slots: torch.Tensor | None, single_slot: int | None = None) -> None:
        """Prepare a forward pass."""
        ...

    def plan_head(self, slots: torch.Tensor, indices: torch.Tensor, single_slot: int | None = None) -> None:
        """Prepare the output projection for some of the step's tokens."""
        ...
