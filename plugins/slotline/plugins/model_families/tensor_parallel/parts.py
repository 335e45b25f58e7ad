"""What a rank has of the tensors of a divided model, for adapters and quantized weights, which are cut alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import nn
from transformers.pytorch_utils import Conv1D

from slotline.registry.contracts.lora import ModulePart

_NOTED = "slotline_cuts"


@frozen(eq=False)
class Taken:
    """Places of a dimension of a tensor that a rank has.

    Attributes:
        dim: the dimension, from 0.
        places: [n] int64 in host memory, in order.
        size: number of all places.
    """

    dim: int
    places: torch.Tensor
    size: int


Cuts = Mapping[str, Mapping[str, Taken]]
"""What a rank has of the tensors of modules: path of a module, name of its tensor, what it has of it."""


def note(module: nn.Module, name: str, taken: Taken) -> None:
    """Keep what a rank has of a tensor of a module until `collect` is called."""
    module.__dict__.setdefault(_NOTED, {})[name] = taken


def collect(model: nn.Module) -> Cuts:
    """Return what was noted, by path of the modules, and forget it."""
    return {name: found for name, module in model.named_modules() if (found := module.__dict__.pop(_NOTED, None))}


def module_parts(model: nn.Module, cuts: Cuts) -> dict[str, ModulePart]:
    """Return what a rank has of linear layers and embeddings, by path."""
    found = {}
    for name, tensors in cuts.items():
        module: Any = model.get_submodule(name)
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D) and "weight" in tensors:
            found[name] = _part(module, tensors["weight"])
    return found


def _part(module: Any, taken: Taken) -> ModulePart:
    sizes = list(module.weight.shape)
    sizes[taken.dim] = taken.size
    first_is_output = isinstance(module, nn.Linear)
    outputs, inputs = sizes if first_is_output else sizes[::-1]
    if (taken.dim == 0) == first_is_output:
        return ModulePart(in_features=inputs, out_features=outputs, outputs=taken.places)
    return ModulePart(in_features=inputs, out_features=outputs, inputs=taken.places)
