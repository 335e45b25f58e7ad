"""What the machine is: the facts that plugins and the plan are told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import psutil
import torch

from slotline.registry.descriptor import DeviceInfo
from slotline.registry.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class HasDevice(Protocol):
    """An object whose work belongs on one device, by its torch device string."""

    device: str


S = TypeVar("S", bound=HasDevice)


def resolve_device(asked: str, *, key: str = "device") -> str:
    """The torch device string for the device that a configuration key names; `auto` is the GPU where there is one.

    Raises:
        ConfigError: if the device is not there.
    """
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"{key} = {asked!r} is not known", fix="use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{key} = {asked!r} is not there: {torch.cuda.device_count()} CUDA devices",
            fix="use one that `slotline doctor` lists, 'cpu' or 'auto'",
        )
    return "cpu" if kind == "cpu" else asked


def device_scope(device: str) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one: kernels that torch does not launch, streams and captures go there.

    `cuda` without a number is the current one.
    """
    kind, _, index = device.partition(":")
    return torch.cuda.device(int(index)) if kind == "cuda" and index else nullcontext()


def on_device(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that runs with its object's device as the current one."""

    @wraps(method)
    def scoped(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        with device_scope(self.device):
            return method(self, *args, **options)

    return scoped


def describe_device(device: str) -> DeviceInfo:
    """The facts of a torch device."""
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        return DeviceInfo(
            type="cuda",
            name=properties.name,
            compute_capability=(properties.major, properties.minor),
            total_memory=properties.total_memory,
            cores=properties.multi_processor_count,
        )
    return DeviceInfo(
        type="cpu",
        name=torch.backends.cpu.get_cpu_capability(),
        features=_cpu_features(),
        total_memory=psutil.virtual_memory().total,
        cores=torch.get_num_threads(),
    )


def _cpu_features() -> frozenset[str]:
    """Instruction sets that change which dtype pays, as far as torch tells them."""
    probes = {
        "avx512_bf16": "_is_avx512_bf16_supported",
        "amx_tile": "_is_amx_tile_supported",
        "avx512": "_is_avx512_supported",
    }
    return frozenset(name for name, probe in probes.items() if getattr(torch.cpu, probe, lambda: False)())
