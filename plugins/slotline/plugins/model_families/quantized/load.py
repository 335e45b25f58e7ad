"""Loading of quantized weights: slots in the place of modules, and their tensors through the weight format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import evolve
from torch import nn

from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.quantized.inspect import is_experts, stems, stored_name
from slotline.plugins.model_families.quantized.slot_linear import SlotExperts, SlotLinear
from slotline.registry.contracts.weight_format import OnlineFormat, WeightFormat
from slotline.registry.contracts.weights import (
    ModelWeights,
    PlannedModule,
    QuantizedWeight,
    WeightModule,
    concatenate,
    stack,
)
from slotline.registry.errors import ModelError
from slotline.registry.tensor_files import StoredTensor
from slotline.registry.tensor_reader import SafetensorsReader

_SINGLE = {
    "gate_proj": ("gate_proj", "up_proj", "down_proj"),
    "w1": ("w1", "w3", "w2"),
    "gate_up_proj": ("gate_up_proj", "", "down_proj"),
}
"""Names of an expert's weights, by the name of the first."""


def with_slots(found: Checkpoint, weights: ModelWeights, dtype: torch.dtype) -> Checkpoint:
    """Return the checkpoint with a model class whose quantized modules are slots without a weight."""
    original = found.model_class

    class Slotted(original):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            replace(self, weights, dtype)

    Slotted.__name__, Slotted.__qualname__, Slotted.__module__ = (
        original.__name__,
        original.__qualname__,
        original.__module__,
    )
    return evolve(found, model_class=Slotted)


def replace(model: nn.Module, weights: ModelWeights, dtype: torch.dtype) -> None:
    """Put slots in the place of a model's quantized modules. Biases stay, weights go."""
    for name, planned in weights.modules.items():
        parent, _, own = name.rpartition(".")
        module: Any = model.get_submodule(name)
        slot: nn.Module
        if planned.module.experts:
            slot = SlotExperts(module, planned.kernel)
        else:
            slot = SlotLinear(module.in_features, module.out_features, planned.kernel, module.bias, dtype)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), own, slot)


def plain_tensors(tensors: tuple[StoredTensor, ...], weights: ModelWeights) -> tuple[StoredTensor, ...]:
    """Return the stored tensors that the weight format does not read."""
    consumed = tuple(_beginnings(weights))
    return tuple(tensor for tensor in tensors if not _is_consumed(tensor.name, consumed))


def plain_state(
    found: Checkpoint, tensors: tuple[StoredTensor, ...], weights: ModelWeights, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], tuple[StoredTensor, ...]]:
    """Return the plain tensors by name, and their descriptions.

    A quantized module that no slot takes (its weight is read beside its forward) is dequantized.
    """
    reader = SafetensorsReader(found.path)
    left = plain_tensors(tensors, weights)
    with torch.device("meta"):
        model = found.model_class(found.config)
    state: dict[str, torch.Tensor] = {}
    for name in _unplanned(model, {tensor.name for tensor in left}):
        if weights.format.scheme_of(name, "linear") is not None:
            weight = weights.format.read(name, "linear")
            weight.check(name)
            state[f"{name}.weight"] = weight.dequantize(dtype)
            beginning = ((f"{name}.", f"{name}.bias"),)
            left = tuple(tensor for tensor in left if not _is_consumed(tensor.name, beginning))
    state |= {tensor.name: reader.read(tensor.name) for tensor in left}
    return state, left


def fill(model: nn.Module, weights: ModelWeights, device: str) -> None:
    """Read, check and pack the weight of every slot of a loaded model.

    Raises:
        ModelError: for a weight that is missing or does not fit.
    """
    for name, planned in weights.modules.items():
        slot: Any = model.get_submodule(name)
        if planned.module.experts:
            gate_up, down = _read_experts(weights.format, planned.module)
            _check(gate_up, planned, planned.module.stored, transposed=False)
            _check(down, planned, planned.module.stored, transposed=True)
            _hold_experts(slot, planned, gate_up, down, device)
        else:
            weight = weights.format.read(planned.module.stored, planned.module.kind)
            _check(weight, planned, planned.module.stored)
            slot.hold(planned.kernel.pack(weight.to(device)))  # type: ignore[call-arg]


def quantize(model: nn.Module, weights: ModelWeights, device: str, dtype: torch.dtype) -> None:
    """Quantize the modules of a model that was loaded in full precision, one by one."""
    online: OnlineFormat = weights.format  # type: ignore[assignment]
    for name, planned in weights.modules.items():
        module: Any = model.get_submodule(name)
        one = evolve(weights, modules={name: planned})
        if planned.module.experts:
            if not is_experts(module):
                raise ModelError(f"{name} holds no experts any more", fix='set weights.quantize = ""')
            parts = [module.gate_up_proj.detach(), module.down_proj.detach()]
            if getattr(module, "is_transposed", False):
                parts = [part.transpose(1, 2) for part in parts]
            quantized = [online.quantize(name, "experts", part) for part in parts]
            replace(model, one, dtype)
            _hold_experts(model.get_submodule(name), planned, quantized[0], quantized[1], device)
        else:
            weight = online.quantize(name, planned.module.kind, module.weight.detach())
            replace(model, one, dtype)
            slot: Any = model.get_submodule(name)
            slot.hold(planned.kernel.pack(weight.to(device)))  # type: ignore[call-arg]


def _hold_experts(
    slot: Any, planned: PlannedModule, gate_up: QuantizedWeight, down: QuantizedWeight, device: str
) -> None:
    biases = [None if b is None else b.detach().to(device) for b in (slot.gate_up_proj_bias, slot.down_proj_bias)]
    slot.hold(planned.kernel.pack(gate_up.to(device), down.to(device), *biases))  # type: ignore[arg-type]


def _read_experts(reader: WeightFormat, module: WeightModule) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Read experts that are stored together, or one by one."""
    stem, _, first = module.stored.rpartition(".")
    parent, _, number = stem.rpartition(".")
    gate, up, down = _SINGLE[first]
    if number != "0":
        return reader.read(f"{stem}.{gate}", "experts"), reader.read(f"{stem}.{down}", "experts")
    both, downs = [], []
    for expert in range(module.experts):
        names = [f"{parent}.{expert}.{part}" for part in (gate, up) if part]
        both.append(concatenate([_read_one(reader, name) for name in names]))
        downs.append(_read_one(reader, f"{parent}.{expert}.{down}"))
    return stack(both), stack(downs)


def _read_one(reader: WeightFormat, name: str) -> QuantizedWeight:
    weight = reader.read(name, "experts")
    weight.check(name)
    return weight


def _check(weight: QuantizedWeight, planned: PlannedModule, name: str, *, transposed: bool = False) -> None:
    """Check a weight against its module's sizes.

    Raises:
        ModelError: naming both shapes.
    """
    weight.check(name)
    module = planned.module
    wanted = [module.out_features, module.in_features]
    if transposed:
        wanted = [module.in_features, module.out_features // 2]
    wanted = [module.experts, *wanted] if module.experts else wanted
    if list(weight.codes.shape) != wanted:
        raise ModelError(
            f"the quantized weight {name} is {list(weight.codes.shape)}, where config.json makes it {wanted}",
            fix="use the config.json that belongs to these weights, or download the checkpoint again",
        )


def _beginnings(weights: ModelWeights) -> Iterator[tuple[str, str]]:
    """Yield (beginning of the names of the tensors that the format reads, a name that it does not)."""
    for planned in weights.modules.values():
        stored = planned.module.stored
        if not planned.module.experts:
            yield f"{stored}.", f"{stored}.bias"
            continue
        stem, _, first = stored.rpartition(".")
        if stem.rpartition(".")[2] == "0":
            yield f"{stem.rpartition('.')[0]}.", ""
        else:
            yield from ((f"{stem}.{part}", f"{stem}.{part}_bias") for part in filter(None, _SINGLE[first]))


def _is_consumed(name: str, beginnings: tuple[tuple[str, str], ...]) -> bool:
    return any(name.startswith(beginning) and name != other for beginning, other in beginnings)


def _unplanned(model: Any, names: set[str]) -> Iterator[str]:
    """Yield the stored names of linear layers that are no slots."""
    known = stems(names)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and (stored := stored_name(name, known)):
            yield stored
