"""Quantized weights of a divided model: each is read or quantized whole, and cut as its module is.

Modules with quantized weights are divided on the meta device, where they have the sizes of the whole model. Slots of
the rank's sizes take their place afterwards. A cut inside a group that shares a scale is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn

from slotline.plugins.model_families import checkpoint, own_stage
from slotline.plugins.model_families.quantized import load
from slotline.plugins.model_families.tensor_parallel import expert_parallel
from slotline.plugins.model_families.tensor_parallel.division import divide
from slotline.plugins.model_families.tensor_parallel.joined import Joined
from slotline.plugins.model_families.tensor_parallel.parts import Cuts, Taken
from slotline.registry.contracts.model_family import ModelContext
from slotline.registry.contracts.weight_format import OnlineFormat
from slotline.registry.contracts.weights import ModelWeights, QuantizedWeight, WeightModule
from slotline.registry.errors import ModelError

Plain = Mapping[str, Sequence[torch.Tensor]]
"""Weights of modules in full precision, by path: one of a linear layer, two of experts."""


def divide_quantized(model: nn.Module, context: ModelContext) -> Joined:
    """Divide a loaded model, and put a rank's part of the quantized weights into it.

    Args:
        model: as `load_transformers_model` returns it, with slots or with weights to be quantized.

    Raises:
        ModelError: naming a weight that is missing, does not fit or cannot be cut between its groups.
        NegotiationError: if a size cannot be divided.
    """
    assert context.weights is not None
    assert context.shard is not None
    weights = context.weights if hasattr(model, "lm_head") else load.without_head(context.weights)
    plain = _hollow(model, weights, context)
    joined = divide(model, context.shard)
    load.replace(model, weights, getattr(torch, context.dtype))
    _share_experts(model, weights, joined, context)
    source = _Source(weights, joined.cuts, plain)
    own = own_stage.own_weights(model, weights, context.own_stage)
    for names in load.products(own, merge=load.merges(context)):
        planned = weights.modules[names[0]]
        if planned.module.experts:
            load.hold_experts(model.get_submodule(names[0]), planned, *source.experts(names[0]), context.device)
        else:
            load.hold_linears(model, names, [source.linear(name) for name in names], context.device)
    return joined


def _share_experts(model: nn.Module, weights: ModelWeights, joined: Joined, context: ModelContext) -> None:
    """Tell slots of experts which experts the rank has."""
    assert context.shard is not None
    for name in joined.mixtures:
        if name in weights.modules:
            module: Any = model.get_submodule(name)
            module.num_experts = weights.modules[name].module.experts
            experts = joined.cuts[name]["down_proj"].size
            expert_parallel.tables(module, experts, context.shard, torch.device(context.device))


def _hollow(model: nn.Module, weights: ModelWeights, context: ModelContext) -> Plain:
    """Put modules of the whole model's sizes without memory in the place of quantized ones. Return plain weights."""
    found = checkpoint.read(context.facts.path, quantized=True)
    with torch.device("meta"):
        whole = found.model_class(found.config)
    plain: dict[str, list[torch.Tensor]] = {}
    for name in weights.modules:
        parent, _, own = name.rpartition(".")
        present, empty = model.get_submodule(name), whole.get_submodule(name)
        if weights.online:
            plain[name] = load.plain_weights(present)
        for bias, tensor in present._parameters.items():
            if bias.endswith("bias") and tensor is not None:
                empty._parameters[bias] = tensor
        setattr(model.get_submodule(parent), own, empty)
    return plain


@frozen(eq=False)
class _Source:
    """Giver of a rank's part of quantized weights."""

    weights: ModelWeights
    cuts: Cuts
    plain: Plain

    def linear(self, name: str) -> QuantizedWeight:
        """Return a rank's part of the weight of a linear layer."""
        planned, taken = self.weights.modules[name], self.cuts.get(name, {}).get("weight")
        if self.weights.online:
            weight = self._quantized(name, planned.module.kind, 0)
        else:
            weight = self.weights.format.read(planned.module.stored, planned.module.kind)
            whole = _whole(planned.module, taken)
            load.check(weight, evolve(planned, module=whole), planned.module.stored)
        if taken is None:
            return weight
        part = _take(weight, -2 if taken.dim == 0 else -1, taken, name)
        return _padded(part, planned.module.out_features)

    def experts(self, name: str) -> tuple[QuantizedWeight, QuantizedWeight]:
        """Return a rank's part of the two weights of experts."""
        planned, taken = self.weights.modules[name], self.cuts.get(name, {})
        first, second = taken.get("gate_up_proj"), taken.get("down_proj")
        if self.weights.online:
            both, down = (self._quantized(name, "experts", place) for place in (0, 1))
        else:
            whole = evolve(planned, module=_whole(planned.module, first))
            both, down = load.read_experts(self.weights.format, whole.module)
            load.check(both, whole, planned.module.stored)
            load.check(down, whole, planned.module.stored, transposed=True)
        if first is not None and first.dim == 0:
            return _experts(both, first.places), _experts(down, first.places)
        both = both if first is None else _take(both, -2, first, name)
        return both, down if second is None else _take(down, -1, second, name)

    def _quantized(self, name: str, kind: str, place: int) -> QuantizedWeight:
        online: OnlineFormat = self.weights.format  # type: ignore[assignment]
        return online.quantize(name, kind, self.plain[name][place])


def _whole(module: WeightModule, taken: Taken | None) -> WeightModule:
    """Return a module with the sizes of the whole model."""
    if taken is None:
        return module
    if module.experts and taken.dim == 0:
        return evolve(module, experts=taken.size)
    if module.experts or taken.dim == 0:
        return evolve(module, out_features=taken.size)
    return evolve(module, in_features=taken.size)


def _experts(weight: QuantizedWeight, places: torch.Tensor) -> QuantizedWeight:
    """Return the weights of some experts."""

    def some(tensor: torch.Tensor | None) -> Any:
        if tensor is None or tensor.dim() == 0 or tensor.shape[0] != weight.codes.shape[0]:
            return tensor
        bytes_ = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # of eight bits, as they are
        return bytes_.index_select(0, places).view(tensor.dtype)

    found: dict[str, Any] = {n: some(getattr(weight, n)) for n in ("codes", "scales", "offsets", "input_scale")}
    return evolve(weight, **found)


def _take(weight: QuantizedWeight, dim: int, taken: Taken, name: str) -> QuantizedWeight:
    """Return the outputs (dim -2) or inputs (dim -1) of a weight that a rank has.

    Raises:
        ModelError: naming the module, if a border lies inside a group.
    """
    cut = weight.rows if dim == -2 else weight.columns
    try:
        pieces = [cut(start, stop) for start, stop in _runs(taken.places)]
    except ModelError as error:
        raise ModelError(
            f"{name}, {weight.scheme.describe()}, cannot be divided among ranks: {error.message}",
            fix="set parallel.tensor = 1, or another number of ranks",
        ) from error
    if len(pieces) == 1:
        return pieces[0]
    shared = weight.scheme.group[dim] == 0 or (dim == -1 and weight.g_idx is not None)

    def joined(field: str) -> Any:
        parts = [getattr(piece, field) for piece in pieces]
        return parts[0] if shared or parts[0] is None else torch.cat(parts, dim)

    order = weight.g_idx if dim == -2 or weight.g_idx is None else weight.g_idx[taken.places]
    codes = torch.cat([piece.codes for piece in pieces], dim)
    return evolve(pieces[0], codes=codes, scales=joined("scales"), offsets=joined("offsets"), g_idx=order)


def _runs(places: torch.Tensor) -> list[tuple[int, int]]:
    """Return the begins and ends of runs of places that follow each other."""
    breaks = (places.diff() != 1).nonzero().flatten() + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in places.tensor_split(breaks) if len(run)]


def _padded(weight: QuantizedWeight, outputs: int) -> QuantizedWeight:
    """Return a weight with zeros behind its outputs, for a vocabulary that the ranks do not divide."""
    missing = outputs - weight.out_features
    if missing == 0:
        return weight
    rows = weight.scheme.scale_shape(outputs, weight.in_features)[0] - weight.scales.shape[-2]

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros(rows, tensor.shape[-1])])

    codes = weight.codes.view(torch.uint8)  # a float of eight bits cannot be joined everywhere
    more = torch.full((missing, codes.shape[-1]), _zero(weight), dtype=torch.uint8)
    codes = torch.cat([codes, more]).view(weight.codes.dtype)
    offsets = None if weight.offsets is None else filled(weight.offsets)
    return evolve(weight, codes=codes, scales=filled(weight.scales), offsets=offsets)


def _zero(weight: QuantizedWeight) -> int:
    """Return the code of the number zero."""
    book = weight.scheme.element.codebook
    return book.index(0.0) if book else 0
