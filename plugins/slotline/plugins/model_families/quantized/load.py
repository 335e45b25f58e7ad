"""Loading of quantized weights: slots in the place of modules, and their tensors through the weight format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import evolve
from torch import nn

from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.passes.merged_projections import GATE_UP, QUERY_KEY_VALUE, share
from slotline.plugins.model_families.quantized.inspect import is_experts, stems, stored_name
from slotline.plugins.model_families.quantized.slot_linear import SlotExperts, SlotLinear
from slotline.registry.contracts.model_family import ModelContext
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


def put(model: nn.Module, weights: ModelWeights, context: ModelContext) -> None:
    """Put the quantized weights into a loaded model: read, or quantized from its own."""
    merge = merges(context)
    if weights.online:
        quantize(model, weights, context.device, getattr(torch, context.dtype), merge=merge)
    else:
        fill(model, weights, context.device, merge=merge)


def merges(context: ModelContext) -> bool:
    """Return True if projections of the same input are joined to one product where that is possible."""
    return context.optimize and not context.batch_invariant


def fill(model: nn.Module, weights: ModelWeights, device: str, *, merge: bool) -> None:
    """Read, check and pack the weight of every slot of a loaded model.

    Args:
        merge: join projections of the same input to one product where that is possible.

    Raises:
        ModelError: for a weight that is missing or does not fit.
    """
    for names in products(weights, merge=merge):
        planned = weights.modules[names[0]]
        if planned.module.experts:
            gate_up, down = read_experts(weights.format, planned.module)
            check(gate_up, planned, planned.module.stored, transposed=False)
            check(down, planned, planned.module.stored, transposed=True)
            hold_experts(model.get_submodule(names[0]), planned, gate_up, down, device)
        else:
            hold_linears(model, names, [_read_linear(weights, name) for name in names], device)


def quantize(model: nn.Module, weights: ModelWeights, device: str, dtype: torch.dtype, *, merge: bool) -> None:
    """Quantize the modules of a model that was loaded in full precision, one product after the other."""
    online: OnlineFormat = weights.format  # type: ignore[assignment]
    for names in products(weights, merge=merge):
        planned, module = weights.modules[names[0]], model.get_submodule(names[0])
        one = evolve(weights, modules={name: weights.modules[name] for name in names})
        if planned.module.experts:
            both = [online.quantize(names[0], "experts", part) for part in plain_weights(module)]
            replace(model, one, dtype)
            hold_experts(model.get_submodule(names[0]), planned, both[0], both[1], device)
        else:
            found = []
            for name in names:
                (plain,) = plain_weights(model.get_submodule(name))
                found.append(online.quantize(name, weights.modules[name].module.kind, plain))
            replace(model, one, dtype)
            hold_linears(model, names, found, device)


def plain_weights(module: Any) -> list[torch.Tensor]:
    """Return the weight [outputs, inputs] of a linear layer, or two [experts, outputs, inputs] of experts."""
    if not is_experts(module):
        return [module.weight.detach()]
    parts = [module.gate_up_proj.detach(), module.down_proj.detach()]
    return [part.transpose(1, 2) for part in parts] if getattr(module, "is_transposed", False) else parts


def without_head(weights: ModelWeights) -> ModelWeights:
    """Return the modules that a task without logits has."""
    return evolve(weights, modules={n: one for n, one in weights.modules.items() if one.module.kind != "head"})


def products(weights: ModelWeights, *, merge: bool) -> Iterator[tuple[str, ...]]:
    """Yield the names of the modules of each product: one module, or projections of the same input."""
    taken: set[str] = set()
    for name in weights.modules:
        parent, _, own = name.rpartition(".")
        for siblings in (QUERY_KEY_VALUE, GATE_UP) if merge else ():
            names = tuple(f"{parent}.{sibling}" for sibling in siblings)
            if own == siblings[0] and _fit_together(weights, names):
                taken.update(names)
                yield names
        if name not in taken:
            yield (name,)


def _fit_together(weights: ModelWeights, names: tuple[str, ...]) -> bool:
    found = [weights.modules[name] for name in names if name in weights.modules]
    if len(found) < len(names):
        return False
    block = found[0].scheme.group[0]
    facts = {(one.scheme, one.module.in_features, type(one.kernel)) for one in found}
    aligned = block <= 1 or all(one.module.out_features % block == 0 for one in found)
    return len(facts) == 1 and block > 0 and aligned and not found[0].scheme.act_order and found[0].scheme.dynamic


def _read_linear(weights: ModelWeights, name: str) -> QuantizedWeight:
    planned = weights.modules[name]
    weight = weights.format.read(planned.module.stored, planned.module.kind)
    check(weight, planned, planned.module.stored)
    return weight


def hold_linears(model: nn.Module, names: tuple[str, ...], found: list[QuantizedWeight], device: str) -> None:
    """Pack the weights of one product, and put a merged product in the place of several slots."""
    slots: list[Any] = [model.get_submodule(name) for name in names]
    biases = [slot.bias for slot in slots if slot.bias is not None]
    if len(slots) == 1 or len(biases) not in (0, len(slots)):
        for slot, weight in zip(slots, found, strict=True):
            slot.hold(slot.kernel.pack(weight.to(device)))
        return
    sizes, first = [slot.out_features for slot in slots], slots[0]
    bias = nn.Parameter(torch.cat([b.detach() for b in biases]), requires_grad=False) if biases else None
    merged = SlotLinear(first.in_features, sum(sizes), first.kernel, bias, first.dtype)
    merged.hold(first.kernel.pack(concatenate(found).to(device)))
    parent = model.get_submodule(names[0].rpartition(".")[0])
    for name, projection in zip(names, share(merged, sizes, first.in_features), strict=True):
        setattr(parent, name.rpartition(".")[2], projection)


def hold_experts(
    slot: Any, planned: PlannedModule, gate_up: QuantizedWeight, down: QuantizedWeight, device: str
) -> None:
    """Pack the weights of experts, with their biases, into a slot."""
    biases = [None if b is None else b.detach().to(device) for b in (slot.gate_up_proj_bias, slot.down_proj_bias)]
    kernel: Any = planned.kernel
    slot.hold(kernel.pack(gate_up.to(device), down.to(device), *biases))


def read_experts(reader: WeightFormat, module: WeightModule) -> tuple[QuantizedWeight, QuantizedWeight]:
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


def check(weight: QuantizedWeight, planned: PlannedModule, name: str, *, transposed: bool = False) -> None:
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
