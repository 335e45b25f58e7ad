"""Keeps some decoder layers' weights in pinned host memory and copies them to the device while their layer runs."""

from __future__ import annotations

from typing import Any

import torch

from slotline.plugins.model_families import pinned_copies
from slotline.registry.errors import ModelError

MIB = 1 << 20


class HostWeights:
    """Parameters of one layer in host memory, with the two hooks that copy them to the device and drop them again.

    The copies run on the current stream, so a captured graph holds them too. The device memory of a layer goes back to
    the allocator as soon as the layer has run.
    """

    def __init__(self, layer: torch.nn.Module, device: torch.device) -> None:
        self._device = device
        self._parameters = list(layer.parameters())
        for parameter in self._parameters:
            parameter.data = parameter.data.cpu().pin_memory()
        self._host = [parameter.data for parameter in self._parameters]
        layer.register_forward_pre_hook(self._fetch)
        layer.register_forward_hook(self._drop, always_call=True)

    def _fetch(self, *_: Any) -> None:
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = host.to(self._device, non_blocking=True)

    def _drop(self, *_: Any) -> None:
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = host


def place(hf_model: Any, device: torch.device, offload_bytes: int) -> tuple[str, ...]:
    """Move a model to its device, all but the last layers that together hold at most `offload_bytes`.

    Returns:
        A note on what stayed in host memory, if anything was asked to.
    """
    if not offload_bytes:
        pinned_copies.move(hf_model, device)
        return ()
    if device.type == "cpu":
        hf_model.to(device)
        return (f"offload_bytes = {offload_bytes} has no effect on cpu: all weights are in host memory",)
    kept = _last_layers_within(list(hf_model.base_model.layers), offload_bytes)
    held = {id(parameter) for layer in kept for parameter in layer.parameters()}
    for parameter in hf_model.parameters():
        if id(parameter) not in held:
            parameter.data = parameter.data.to(device)
    _move_buffers(hf_model, device)
    for layer in kept:
        HostWeights(layer, device)
    total = sum(map(_size, kept))
    return (
        f"{len(kept)} of {len(hf_model.base_model.layers)} layers ({total / MIB:.1f} MiB of at most "
        f"{offload_bytes / MIB:.1f} MiB) stay in pinned host memory and are copied in each step",
    )


def place_whole(hf_model: Any, device: torch.device, offload_bytes: int) -> tuple[str, ...]:
    """Move a whole model whose layers cannot be copied one by one.

    Raises:
        ModelError: if a part of it should stay in host memory.
    """
    if offload_bytes and device.type != "cpu":
        raise ModelError(
            f"offload_gib = {offload_bytes / 2**30:g}: the layers of {type(hf_model).__name__} cannot stay in host "
            "memory",
            fix="set offload_gib = 0",
        )
    return place(hf_model, device, offload_bytes)


def _last_layers_within(layers: list[torch.nn.Module], budget: int) -> list[torch.nn.Module]:
    kept: list[torch.nn.Module] = []
    for layer in reversed(layers):
        budget -= _size(layer)
        if budget < 0:
            break
        kept.append(layer)
    return kept


def _size(layer: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters())


def _move_buffers(hf_model: torch.nn.Module, device: torch.device) -> None:
    for module in hf_model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
