"""Models from weights that were saved after the passes: built without memory, passed without checks, then filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import nn

from slotline.plugins.model_families import (
    binding,
    checkpoint,
    inspection,
    kv_scales,
    random_weights,
    saved_codes,
    saved_weights,
    structure,
)
from slotline.plugins.model_families.naming import listed
from slotline.plugins.model_families.passes.decisions import Decisions
from slotline.plugins.model_families.passes.packed_linear import PackedLinear
from slotline.plugins.model_families.saved_weights import SavedWeights
from slotline.registry.contracts.model_family import SAVED_WEIGHTS, ModelContext
from slotline.registry.errors import ModelError
from slotline.registry.read_ahead import read_ahead
from slotline.registry.tensor_reader import SafetensorsReader

NOTE = "weights saved after the passes: they are read as they were, and the passes check nothing"


@define(eq=False)
class Origin:
    """What a model was before its passes, and what they decided, so that it can be saved.

    Attributes:
        tied, dtypes: see `SavedWeights`.
        computed: names of buffers that the model computes from its configuration.
        decisions: of the passes.
        lean: True if the loop over the layers is ours.
        notes: what was done to the model, in words.
    """

    tied: dict[str, str] = field(factory=dict)
    dtypes: dict[str, str] = field(factory=dict)
    computed: frozenset[str] = frozenset()
    decisions: Decisions = field(factory=Decisions)
    lean: bool = False
    notes: tuple[str, ...] = ()


def origin_of(hf_model: nn.Module, dtype: str) -> Origin:
    """Return the origin of a loaded model before its passes."""
    tensors = list(_named(hf_model))
    return Origin(
        tied=saved_weights.ties((name, tensor) for name, tensor, computed in tensors if not computed),
        dtypes={
            name: str(tensor.dtype).removeprefix("torch.")
            for name, tensor, computed in tensors
            if not computed and tensor.dtype != getattr(torch, dtype)
        },
        computed=frozenset(name for name, _, computed in tensors if computed),
    )


def skeleton(context: ModelContext, saved: SavedWeights) -> Any:
    """Return the model with weights on the meta device, and what it computes itself in host memory.

    Quantized weights are there already, packed on the device.
    """
    model = random_weights.unfilled(checkpoint.read(context.facts.path), context.dtype, "cpu")
    hollow(model, saved.tied, saved.dtypes, context.dtype)
    read_ahead((context.facts.path / name for name in saved.files), progress=context.progress)
    saved_codes.put(model, context)
    return inspection.adopted(structure.find_body(model.eval().requires_grad_(False)), binding.slot_attention)


def hollow(model: nn.Module, tied: Mapping[str, str], dtypes: Mapping[str, str], dtype: str) -> None:
    """Put weights on the meta device in the place of a model's own.

    Args:
        tied, dtypes: see `SavedWeights`.
        dtype: of the weights without a dtype of their own.
    """
    made: dict[str, torch.Tensor] = {}
    for name, tensor, computed in list(_named(model)):
        if computed:
            continue
        parent, _, own = name.rpartition(".")
        module, owner = model.get_submodule(parent), tied.get(name, name)
        if owner not in made:
            empty = torch.empty_like(tensor, dtype=_dtype(dtypes.get(owner, dtype)), device="meta")
            made[owner] = nn.Parameter(empty, requires_grad=False) if own in module._parameters else empty
        place: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
        place[own] = made[owner]


def place_computed(hf_model: nn.Module, device: torch.device) -> None:
    """Move the buffers that a skeleton computed to a device."""
    for module in hf_model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def fill(hf_model: nn.Module, saved: SavedWeights, context: ModelContext, device: torch.device) -> None:
    """Read the weights of a skeleton whose passes have run.

    Raises:
        ModelError: if weights are missing, left over, or of other shapes.
    """
    path = context.facts.path
    places = dict(empty_places(hf_model))
    if wrong := sorted(saved.weights.keys() ^ places.keys()):
        raise ModelError(
            f"the weights in {path} are not those of the model after its passes: {listed(wrong)}",
            fix="save them again from the checkpoint that they were made from",
        )
    reader = SafetensorsReader(path)
    for name, (module, own, tensor) in places.items():
        stored = reader.read(name)
        if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise ModelError(
                f"{name} in {path} is {list(stored.shape)} of {stored.dtype}, "
                f"and the model has {list(tensor.shape)} of {tensor.dtype}",
                fix=f"copy the folder again with its {SAVED_WEIGHTS}",
            )
        put(module, own, tensor, stored.to(device))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"{SAVED_WEIGHTS} names {name!r}, which is no dtype", fix="save the weights again")
    return dtype


def put(module: nn.Module, own: str, empty: torch.Tensor, stored: torch.Tensor) -> None:
    """Put a weight in the place of an empty one, and of all who hold it."""
    if type(module) is PackedLinear and own == "packed":
        module._buffers[own] = module.pack(stored)
    elif isinstance(empty, nn.Parameter):
        torch.utils.swap_tensors(empty, nn.Parameter(stored, requires_grad=False))
    else:
        torch.utils.swap_tensors(empty, stored)


def empty_places(hf_model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, torch.Tensor]]]:
    """Yield name, module, own name and tensor of each weight without memory, tied ones once."""
    seen: set[int] = set()
    for name, tensor in (*hf_model.named_parameters(), *hf_model.named_buffers()):
        if tensor.is_meta and id(tensor) not in seen:
            seen.add(id(tensor))
            parent, _, own = name.rpartition(".")
            yield name, (hf_model.get_submodule(parent), own, tensor)


def _named(hf_model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield name, tensor and whether it is computed from the configuration, tied ones under each name."""
    for prefix, module in hf_model.named_modules():
        own: Mapping[str, Any] = module._parameters | module._buffers
        for name, tensor in own.items():
            if tensor is not None:
                yield f"{prefix}.{name}".lstrip("."), tensor, name in module._non_persistent_buffers_set


def save(
    folder: Path,
    origin: Origin,
    tensors: Mapping[str, torch.Tensor],
    context: ModelContext,
    load: Callable[[ModelContext], Any],
) -> None:
    """Write the tensors of a model after its passes.

    Args:
        folder: see `saved_weights.write`.
        origin: of the model.
        tensors: of the model, by name.
        context: of the model.
        load: returns the model of a context before its passes.

    Raises:
        ModelError: if a model of this kind cannot be saved, or the folder cannot be written.
    """
    if reason := _refusal(origin, context):
        raise ModelError(f"the weights of {context.facts.path} cannot be saved: {reason[0]}", fix=reason[1])
    saved = SavedWeights(
        format=saved_weights.FORMAT,
        fits=saved_weights.conditions(context),
        config_sha256="",
        files={},
        weights={},
        quantize="" if context.weights is None else context.weights.method,
        tied=origin.tied,
        dtypes=origin.dtypes,
        answers=origin.decisions.answers,
        lean=origin.lean,
        notes=list(origin.notes),
    )
    kept = {name: tensor for name, tensor in tensors.items() if name not in origin.computed}
    others = saved_codes.tensors(context, load) | kv_scales.tensors(context.facts.layers, context.facts.kv_scales)
    saved_weights.write(folder, saved, kept, others, context.facts.path)


def _refusal(origin: Origin, context: ModelContext) -> tuple[str, str] | None:
    """Return why a model cannot be saved, and what helps, or None."""
    own = "use the checkpoint itself"
    if context.weights is not None and not context.weights.online:
        return "they are quantized in the checkpoint, and read from it as they are", own
    if context.stages or context.own_stage is not None:
        return "they are divided over pipeline stages", "save them from an engine with one device"
    if context.task != "generate":
        return f"the task is {context.task}, and its model is without the output projection", 'set task = "generate"'
    if context.facts.modalities:
        return "the model takes other inputs than text", own
    if checkpoint.read(context.facts.path).whole is not None:
        return "they are only a part of the checkpoint", own
    if not origin.decisions.complete or not _is_json(origin.decisions.answers):
        return "a pass over this model cannot be repeated without its checks", "save them with optimize = false"
    return None


def _is_json(value: Any) -> bool:
    """Return True for what a JSON file holds as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (bool, int, float, str))
