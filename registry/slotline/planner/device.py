"""Resolve a device string and describe the machine."""

from __future__ import annotations

import psutil
import torch

from slotline.registry.descriptor import DeviceInfo
from slotline.registry.errors import ConfigError


def resolve_device(asked: str, *, key: str = "device") -> str:
    """Return the torch device string for a configured device. `auto` is the GPU if there is one.

    Raises:
        ConfigError: if the device is unknown or missing.
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


def describe_device(device: str) -> DeviceInfo:
    """Return the facts of a torch device."""
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
    """Return the instruction sets that torch reports and that decide which dtype pays."""
    probes = {
        "avx512_bf16": "_is_avx512_bf16_supported",
        "amx_tile": "_is_amx_tile_supported",
        "avx512": "_is_avx512_supported",
    }
    return frozenset(name for name, probe in probes.items() if getattr(torch.cpu, probe, lambda: False)())
