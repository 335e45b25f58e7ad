"""Scope of a device: make it the current one while its work is launched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class HasDevice(Protocol):
    """An object whose work belongs on one device, by its torch device string."""

    device: str


S = TypeVar("S", bound=HasDevice)


def device_scope(device: str) -> AbstractContextManager[Any]:
    """Return a context that makes a device the current one, by its torch device string.

    Kernels that torch does not launch, streams and captures go there. A string without a number is the current one.
    """
    kind, _, index = device.partition(":")
    if not index or kind == "cpu":
        return nullcontext()
    scope: AbstractContextManager[Any] = torch.get_device_module(kind).device(int(index))
    return scope


def on_device(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have a method run with its object's device as the current one."""

    @wraps(method)
    def scoped(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        with device_scope(self.device):
            return method(self, *args, **options)

    return scoped
