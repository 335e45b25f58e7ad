"""Division of a transformers model among the ranks of a tensor group, in place, before the passes.

Each kind of layer has a recipe that finds it by its parts. A layer that no recipe knows stays whole on each rank, which
costs memory and time but gives the same numbers.
"""

from __future__ import annotations

from typing import Any

from slotline.plugins.model_families.tensor_parallel import (
    attention,
    expert_parallel,
    experts,
    mixers,
    mlps,
    parts,
    vocabulary,
)
from slotline.plugins.model_families.tensor_parallel.joined import Joined
from slotline.plugins.model_families.tensor_parallel.work import Work
from slotline.registry.contracts.model_family import Shard
from slotline.registry.errors import NegotiationError


def divide(hf_model: Any, shard: Shard, body: Any = None) -> Joined:
    """Leave each module only what a rank has of it, and return where the ranks join their outputs.

    The model may be on the meta device.

    Args:
        hf_model: changed in place.
        shard: the rank's part.
        body: the module whose layers are divided, by default the model's decoder or encoder.

    Raises:
        NegotiationError: if a size cannot be divided, or no layer of the model.
    """
    work = Work(shard, Joined(own_tokens=shard.own_tokens or shard.replicas > 1))
    body = body or hf_model.base_model
    prefix = next(name for name, module in hf_model.named_modules() if module is body)
    layers = set(getattr(body, "layers", body).modules())  # encoders of other inputs may lie beside them
    named = [(f"{prefix}.{name}".strip("."), module) for name, module in body.named_modules() if module in layers]
    if shard.own_tokens:
        return _divide_mixtures(work, hf_model, named)
    modules = dict(named)
    for name, module in named:
        if module in work.done or mixers.divide(work, name, module):
            continue
        if attention.is_attention(module):
            attention.divide(work, name, module, modules.get(name.rpartition(".")[0], hf_model))
    for name, module in named:
        if module not in work.done:
            experts.divide_block(work, name, module)
    for name, module in named:
        if module not in work.done and experts.is_experts(module):
            experts.divide(work, name, module)
    for name, module in named:
        if module not in work.done:
            mlps.divide(work, name, module)
    if not work.joined.divided:
        raise NegotiationError(
            f"parallel.tensor = {shard.size}: no layer of {type(hf_model).__name__} is of a kind that can be divided"
            + "".join(f"; {note}" for note in work.joined.notes),
            fix="set parallel.tensor = 1",
        )
    expert_parallel.refuse_left(named, work.joined.mixtures, shard)
    vocabulary.divide(work, hf_model)
    work.joined.cuts = parts.collect(hf_model)
    work.joined.parts = parts.module_parts(hf_model, work.joined.cuts)
    return work.joined


def _divide_mixtures(work: Work, hf_model: Any, named: list[tuple[str, Any]]) -> Joined:
    """Leave a rank with tokens of its own its part of the experts, and all else whole."""
    for name, module in named:
        if expert_parallel.is_mixture(module):
            experts.divide(work, name, module)
    work.joined.summed.clear()  # the exchange of tokens joins them
    work.joined.cuts = parts.collect(hf_model)
    return work.joined
