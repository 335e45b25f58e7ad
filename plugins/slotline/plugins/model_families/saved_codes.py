"""Quantized weights in saved folders: their canonical tensors, which each start packs for the products of its machine.

Packed tensors are not saved: their layout belongs to a plugin, and some hang on the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn

from slotline.plugins.model_families.quantized import load as quantized
from slotline.registry.contracts.model_family import ModelContext
from slotline.registry.contracts.weights import ModelWeights, PlannedModule, QuantizedWeight, WeightScheme
from slotline.registry.tensor_reader import SafetensorsReader

PARTS = ("codes", "scales", "offsets", "g_idx", "input_scale")
"""Tensors of a `QuantizedWeight`. Most weights have only the first two or three."""

_BIASES = ("gate_up_proj_bias", "down_proj_bias")
_EXPERTS = ("gate_up_proj", "down_proj")


@frozen(eq=False)
class SavedFormat:
    """Reader of the quantized weights in a saved folder. See `slotline.registry.contracts.weight_format.WeightFormat`.

    Attributes:
        reader: the folder's tensors.
        schemes: the form of each module's weights, by its name.
    """

    reader: SafetensorsReader
    schemes: dict[str, WeightScheme]

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        return self.schemes.get(name.rpartition(".")[0] if kind == "experts" else name)

    def read(self, name: str, kind: str) -> QuantizedWeight:
        scheme = self.scheme_of(name, kind)
        assert scheme is not None
        needed = {
            part: f"{name}.{part}" for part in PARTS if part in PARTS[:2] or f"{name}.{part}" in self.reader.stored
        }
        return QuantizedWeight(scheme=scheme, **{part: self.reader.read(full) for part, full in needed.items()})


def describe(weights: ModelWeights | None) -> list[str]:
    """Return the forms of a model's quantized weights in words, without what activations may be rounded to."""
    modules = () if weights is None else weights.modules.values()
    return sorted({evolve(one.scheme, activation="").describe() for one in modules})


def put(model: nn.Module, context: ModelContext) -> None:
    """Put the quantized weights of a saved folder into a model without weights."""
    weights = context.weights
    if weights is None:
        return
    reader = SafetensorsReader(context.facts.path)
    saved = _saved(weights, reader)
    quantized.replace(model, saved, getattr(torch, context.dtype))
    for name, planned in saved.modules.items():
        slot: Any = model.get_submodule(name)
        for bias in _BIASES if planned.module.experts else ():
            if slot._parameters.get(bias) is not None:
                slot.register_parameter(bias, nn.Parameter(reader.read(f"{name}.{bias}"), requires_grad=False))
    quantized.fill(model, saved, context.device, merge=quantized.merges(context))


def tensors(context: ModelContext, load: Callable[[ModelContext], Any]) -> dict[str, torch.Tensor]:
    """Return the canonical tensors of a model's quantized weights, made again from the checkpoint.

    Args:
        load: returns the model in full precision.
    """
    weights = context.weights
    if weights is None:
        return {}
    if context.load_format == "sharded":
        reader = SafetensorsReader(context.facts.path)
        names = (name for one in weights.modules for name in reader.stored if name.startswith(f"{one}."))
        return {name: reader.read(name) for name in names if name.rpartition(".")[2] in (*PARTS, *_BIASES)}
    model = load(evolve(context, weights=None, progress=False))
    return {name: tensor for one in weights.modules.values() for name, tensor in _quantized(model, weights, one)}


def _saved(weights: ModelWeights, reader: SafetensorsReader) -> ModelWeights:
    """Return the modules of a plan, to be read from a saved folder."""
    modules = {
        name: evolve(one, module=evolve(one.module, stored=f"{name}.{_EXPERTS[0]}" if one.module.experts else name))
        for name, one in weights.modules.items()
    }
    return evolve(weights, format=SavedFormat(reader, {n: one.scheme for n, one in modules.items()}), modules=modules)


def _quantized(model: nn.Module, weights: ModelWeights, planned: PlannedModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module's weights as they are quantized at load, and biases that are packed with them."""
    name, kind = planned.module.name, planned.module.kind
    module: Any = model.get_submodule(name)
    if not planned.module.experts:
        yield from _parts(name, weights.format.quantize(name, kind, module.weight.detach()))  # type: ignore[attr-defined]
        return
    for own in _EXPERTS:
        part = getattr(module, own).detach()
        part = part.transpose(1, 2) if getattr(module, "is_transposed", False) else part
        yield from _parts(f"{name}.{own}", weights.format.quantize(name, kind, part))  # type: ignore[attr-defined]
    yield from ((f"{name}.{bias}", b.detach()) for bias in _BIASES if (b := module._parameters.get(bias)) is not None)


def _parts(name: str, weight: QuantizedWeight) -> Iterator[tuple[str, torch.Tensor]]:
    return ((f"{name}.{part}", found) for part in PARTS if (found := getattr(weight, part)) is not None)
