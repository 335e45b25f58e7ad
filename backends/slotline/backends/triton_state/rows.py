"""Rows of a batch for a launch, and numbers that launches of all kinds need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import triton
from attrs import frozen
from torch import Tensor

from slotline.backends.triton_state.kernels import common

Tensors = Mapping[str, Tensor]
CLEAR = 1024
"""Values that a program sets to zero at a time."""


@frozen(kw_only=True, eq=False)
class Rows:
    """Rows `first` .. `end` of a batch, and the tokens of the step's tensors.

    Attributes:
        starts, slots, has_state: the batch's tensors, read only on the device, the last one as int8.
        num_tokens: rows of the inputs, padding included.
        cores: multiprocessors of the device.
        early: True if a kernel may start while the previous one ends (programmatic dependent launch).
        ahead: True if it may then read slots and states immediately (see `order.Order`). If False, others rely on its
            wait.
    """

    starts: Tensor
    slots: Tensor
    has_state: Tensor
    first: int
    end: int
    num_tokens: int
    cores: int
    early: bool = False
    ahead: bool = False

    def start(self, programs: int = 0, most: float = float("inf")) -> dict[str, int | bool]:
        """Return the options of a launch of this number of programs, without options that the device does not have.

        It reads ahead if there are at most `most` programs per multiprocessor.
        """
        ahead = programs <= most * self.cores
        options: dict[str, int | bool] = {"waits": int(not self.ahead), "early": self.early, "ahead": ahead}
        return {**options, "launch_pdl": True} if self.early else options

    @property
    def count(self) -> int:
        """Rows."""
        return self.end - self.first

    def chunks(self, size: int) -> int:
        """Return the most chunks of this many tokens that the rows can have, counted from each row's first token."""
        return (self.num_tokens - self.first) // size + self.count  # every row before these has a token


class Operator(Protocol):
    """The launches of one kind of layer."""

    def decode(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        """Compute rows with one token each, where token r is row r's. Rows with slot -1 get zeros."""
        ...

    def prefill(self, facts: Mapping[str, Any], inputs: Tensors, state: Tensors, out: Tensor, rows: Rows) -> None:
        """Compute rows with any number of tokens. Tokens of rows with slot -1 are not changed."""
        ...


def clear_padding(out: Tensor, rows: Rows) -> None:
    """Clear the tokens that `Operator.prefill` does not write."""
    size = out[0].numel()
    common.clear[(rows.count + 1, 8)](
        out, rows.starts, rows.slots, rows.first, rows.end, rows.num_tokens, size, block=CLEAR
    )


def padded(size: int, least: int = 1) -> int:
    """Return the size in a kernel's tile."""
    return max(least, int(triton.next_power_of_2(size)))


def limits(facts: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bounds of the time step."""
    low, high = facts.get("dt_limit") or (float("-inf"), float("inf"))
    return float(low), float(high)


def precision(dtype: torch.dtype) -> str:
    """Return the rounding of products: none if the activations are float32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def given(inputs: Tensors, name: str, instead: Tensor) -> Tensor:
    """Return an optional input, or any tensor, which a kernel does not read then."""
    return inputs.get(name, instead)
