"""Division of a step's tokens among the ranks of a tensor group, between attention and MLPs (sequence parallel).

Each rank has as many neighbouring tokens, and adds and norms the hidden states of these alone. Tokens that the ranks do
not divide are filled up with zeros behind the last one, so that pieces are equal and none is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slotline.registry.contracts.communicator import Communicator

if TYPE_CHECKING:
    from slotline.registry.contracts.model_family import Tap


class TokenDivision:
    """The tokens of a step that a rank has hidden states of.

    Args:
        communicator: of the tensor group. None for a model whose hidden states are never divided.

    Attributes:
        divides: whether hidden states are ever divided.
        divided: whether they are at this place of the current forward pass.
        count: number of tokens of the current forward pass. 0 outside.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self._communicator: Any = communicator
        self.divides = communicator is not None
        self.divided = False
        self.count = 0

    @contextmanager
    def step(self, count: int, *, divided: bool = True) -> Iterator[None]:
        """Serve one forward pass.

        Args:
            count: number of its tokens.
            divided: whether hidden states are divided from the start.
        """
        self.count, self.divided = count, divided and self.divides
        try:
            yield
        finally:
            self.count, self.divided = 0, False

    @contextmanager
    def left_whole(self) -> Iterator[None]:
        """Leave hidden states whole inside, for comparisons."""
        before, self.divides = self.divides, False
        try:
            yield
        finally:
            self.divides = before

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return a rank's rows of hidden states [.., count, hidden_size], which are divided from now on in a step."""
        self.divided = self.divides and self.count > 0
        return self.own(x) if self.divided else x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [.., count, hidden_size] of all tokens, which are whole from now on."""
        x = self.whole(x)
        self.divided = False
        return x

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows [.., n, hidden_size] of hidden states [.., count, hidden_size]."""
        each = self._each
        start = self._communicator.rank * each
        return _filled(x[..., start : start + each, :], each)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows [.., count, size] of all ranks of [.., n, size], or x where it is not divided."""
        if not self.divided:
            return x
        found = self._communicator.all_gather(x.reshape(-1, x.shape[-1]).contiguous())
        return found[: self.count].view(*x.shape[:-2], self.count, x.shape[-1])  # type: ignore[no-any-return]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of parts [.., count, hidden_size]: of own rows, or of all if not divided."""
        if not self.divided:
            return self._communicator.all_reduce(x.contiguous())  # type: ignore[no-any-return]
        rows = _filled(x.reshape(-1, x.shape[-1]), self._each * self._communicator.size)
        found = self._communicator.reduce_scatter(rows.contiguous())
        return found.view(*x.shape[:-2], self._each, x.shape[-1])  # type: ignore[no-any-return]

    def some(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the rows [.., n, hidden_size] of the `wanted` [n] tokens, which are whole from now on."""
        if not self.divided:
            return x[:, wanted]
        each = self._each
        if not 0 < len(wanted) < each:
            return self.leave(x)[:, wanted]
        self.divided = False
        places = wanted - self._communicator.rank * each
        elsewhere = (places < 0) | (places >= each)
        rows = x[:, places.clamp(0, each - 1)].masked_fill(elsewhere[:, None], 0.0)
        return self._communicator.all_reduce(rows)  # type: ignore[no-any-return]

    def tapping(self, tap: Tap | None) -> Tap | None:
        """Return a tap that shows the hidden states of all tokens, to one that reads those of its layers."""
        if tap is None or not self.divides:
            return tap
        layers = getattr(tap, "layer_ids", None)

        def shown(index: int, hidden_states: torch.Tensor) -> None:
            if layers is None or index in layers:
                tap(index, self.whole(hidden_states))

        return shown

    @property
    def _each(self) -> int:
        return -(-self.count // self._communicator.size)  # type: ignore[no-any-return]


WHOLE = TokenDivision()
"""Of a model whose hidden states are never divided."""


class Gathering:
    """Hook in front of a module that mixes tokens, or whose weights are divided: it is given those of all ranks."""

    def __init__(self, tokens: TokenDivision) -> None:
        self._tokens = tokens

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not self._tokens.divided:
            return None
        if args:
            return (self._tokens.whole(args[0]), *args[1:]), options
        return args, options | {"hidden_states": self._tokens.whole(options["hidden_states"])}


def only_gathers(module: nn.Module) -> bool:
    """Return True for a module without other hooks than a `Gathering`."""
    hooks: Any = module._forward_pre_hooks
    return not module._forward_hooks and all(type(hook) is Gathering for hook in hooks.values())


def _filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [.., rows, size] with zeros behind the rows of x."""
    missing = rows - x.shape[-2]
    return x if missing == 0 else nn.functional.pad(x, (0, 0, 0, missing))
