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
    """Makes a CUDA device the current one: kernels that torch does not launch, streams and captures go there.

    `cuda` without a number is the current one.
    """
    kind, _, index = device.partition(":")
    return torch.cuda.device(int(index)) if kind == "cuda" and index else nullcontext()


def on_device(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have a method run with its object's device as the current one."""

    @wraps(method)
    def scoped(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        with device_scope(self.device):
            return method(self, *args, **options)

    return scoped
