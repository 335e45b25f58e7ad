"""Linear layer with room after its weight, for matrices that are multiplied with the same inputs.

A product of few tokens takes as long as its weight takes to be fetched, so one product of a taller weight costs less
than two. The weight stays where it is in the module tree, as the first rows of a larger tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from slotline.plugins.model_families.passes.merged_projections import PlainMerged

if TYPE_CHECKING:
    from slotline.registry.contracts.model_family import AddShares

ProductInParts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int], torch.Tensor | None]
"""Inputs, taller weight, its bias and out_features to parts, as `FusedKernels.extended_parts`."""


class ExtendedLinear:
    """The forward of a linear layer while adapters are in use.

    Args:
        module: whose place is taken.
        names: the linear layers that it makes, for `AddShares`.
        rows: of the room.
        max_tokens: up to which the product is taken with both.
        single_rows: first rows of the room, the only ones multiplied in steps of one adapter.

    Attributes:
        room: [rows, in_features], zeros at first.
    """

    def __init__(
        self, module: nn.Linear | PlainMerged, names: tuple[str, ...], rows: int, max_tokens: int, single_rows: int = 0
    ) -> None:
        self._module: nn.Linear | PlainMerged = module
        self._names, self._max_tokens = names, max_tokens
        self._original: Callable[[torch.Tensor], torch.Tensor] = module.forward
        self._linear: Callable[..., torch.Tensor] = getattr(module, "linear", nn.functional.linear)
        self._size: int = self._module.weight.shape[0]
        self._weight = _with_room(self._module.weight, rows)
        self._bias = None if self._module.bias is None else _with_room(self._module.bias, rows)
        self._rows_of_one = self._size + single_rows
        self._used = self._weight, self._bias
        self._add: AddShares | None = None
        self.room = self._weight[self._size :]

    def enter(self, add: AddShares, *, single: bool = False) -> None:
        """Replace the module, and call `add` after each product. `single` is True if the step has one adapter."""
        self._add = add
        count = self._rows_of_one if single else len(self._weight)
        self._used = self._weight[:count], None if self._bias is None else self._bias[:count]
        self._module.forward = self  # type: ignore[method-assign]

    def leave(self) -> None:
        """Give the place back."""
        self._module.__dict__.pop("forward", None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features], columns of a wider tensor if there are few tokens."""
        assert self._add is not None
        inputs = x.flatten(0, -2)
        if len(inputs) > self._max_tokens:
            out = self._original(x)
            self._add(self._names, inputs, out.view(-1, self._size))
            return out
        whole = self._linear(x, *self._used)  # [..., out_features + rows]
        out, flat = whole[..., : self._size], whole.view(-1, whole.shape[-1])
        self._add(self._names, inputs, flat[:, : self._size], flat[:, self._size :])
        return out

    def parts(self, x: torch.Tensor, product: ProductInParts) -> torch.Tensor:
        """Compute the call in parts [parts, ..., out_features] whose sum it is, by a possibly slower product."""
        assert self._add is not None
        inputs = x.flatten(0, -2)
        whole = None if len(inputs) > self._max_tokens else product(x, *self._used, self._size)
        if whole is None:
            return self(x)[None]
        flat = whole.view(len(whole), -1, whole.shape[-1])  # [parts, num_tokens, out_features + rows]
        self._add(self._names, inputs, flat[0, :, : self._size], flat[:, :, self._size :])
        return whole[..., : self._size]


def _with_room(parameter: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor with zero rows after the parameter, which becomes its first part in place."""
    size = parameter.shape[0]
    whole = parameter.new_zeros((size + rows, *parameter.shape[1:]))
    whole[:size] = parameter
    parameter.data = whole[:size]
    return whole
