"""Stand-ins for values on the meta device, where code asks for a number that depends on the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class UnknownValues(TorchFunctionMode):
    """Answers for tensors without memory: numbers are zero, and no element of one is other than zero.

    Mixtures of experts ask which experts have tokens. Inspection wants only the calls of attention, so that the answer
    may be none.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, or answer for it."""
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.device.type == "meta" and (answer := _ANSWERS.get(func)):
            return answer(first, args[1:], kwargs or {})
        return func(*args, **(kwargs or {}))


def _nonzero(tensor: torch.Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if options.get("as_tuple") or True in rest:
        return tuple(tensor.new_empty(0, dtype=torch.int64) for _ in range(max(1, tensor.ndim)))
    return tensor.new_empty((0, tensor.ndim), dtype=torch.int64)


def _where(condition: torch.Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if rest or options:
        return torch._C._VariableFunctions.where(condition, *rest, **options)
    return _nonzero(condition, (), {"as_tuple": True})


def _zero(tensor: torch.Tensor, *_: Any) -> Any:
    return 0 if not (tensor.is_floating_point() or tensor.dtype == torch.bool) else tensor.dtype.is_floating_point * 0.0


def _zeros(tensor: torch.Tensor, *_: Any) -> Any:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu").tolist()


def _false(*_: Any) -> bool:
    return False


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.nonzero: _nonzero,
    torch.nonzero: _nonzero,
    torch.where: _where,
    torch.Tensor.item: _zero,
    torch.Tensor.tolist: _zeros,
    torch.Tensor.__bool__: _false,
    torch.Tensor.__int__: lambda *_: 0,
    torch.Tensor.__index__: lambda *_: 0,
    torch.Tensor.__float__: lambda *_: 0.0,
}
