"""Division of mixtures by whole experts: which copies of experts a rank has, and where the others are.

All ranks together have slots, as many on each. A slot holds a copy of one expert. The placement of a mixture names
the expert of each slot: those of rank r are the slots from r * n on, if each rank has n.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from slotline.plugins.model_families.tensor_parallel import parts
from slotline.registry.contracts.model_family import Shard
from slotline.registry.errors import NegotiationError

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
"""Parameters of a mixture with one entry for each expert."""
PLACEMENT, LOCAL, PLACES, LOADS = "slotline_placement", "slotline_local", "slotline_places", "slotline_loads"
"""Buffers of a divided mixture: the expert of each slot [slots] int64, a rank's slot of each expert [experts, w] int32
or the number of its slots for an expert of another rank, the slot of each expert among all [experts, w] int64, and the
tokens that each expert had [experts] int64 if they are counted. The token t takes the entry t % w."""
_COPIES = 24
"""Entries of an expert if there are redundant slots: a multiple of most numbers of copies."""


def refuse_left(named: Iterable[tuple[str, Any]], mixtures: Collection[str], shard: Shard) -> None:
    """Refuse a model that has mixtures besides those whose experts the ranks share.

    Raises:
        NegotiationError: naming the first one.
    """
    left = [name for name, module in named if is_mixture(module) and name not in mixtures]
    if shard.experts and left:
        raise NegotiationError(
            f"parallel.expert = {shard.expert_ranks}: no recipe shares the experts of {left[0]!r}",
            fix="set parallel.expert = 1",
        )


def is_mixture(module: Any) -> bool:
    """Return True for a mixture of experts whose forward takes tokens, chosen experts and their weights.

    Experts that give their input are not among its weights, so a mixture with them is none.
    """
    known = hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")
    return known and "down_proj" in module._parameters and module._modules.get("identity_expert") is None


def numbers_of_experts(model: nn.Module) -> tuple[int, ...]:
    """Return the number of experts of each mixture of a whole model."""
    return tuple(int(module.num_experts) for module in model.modules() if is_mixture(module))  # type: ignore[arg-type]


def own(module: Any, name: str, shard: Shard) -> None:
    """Leave a mixture only the experts that a rank has.

    Raises:
        NegotiationError: if the experts cannot be shared evenly.
    """
    experts = int(module.num_experts)
    ranks, rank = shard.expert_ranks, shard.expert_rank
    slots = experts + shard.redundant_experts
    if slots % ranks or not 0 <= shard.redundant_experts <= experts * (ranks - 1):
        raise NegotiationError(
            f"parallel.expert = {ranks}: {experts} experts of {name!r} and {shard.redundant_experts} redundant "
            f"ones cannot be shared evenly by {ranks} ranks",
            fix=f"set parallel.redundant_experts = {-experts % ranks}",
        )
    local = slots // ranks
    mine = torch.from_numpy(first_placement(experts, slots)[rank * local : (rank + 1) * local])
    for weight in WEIGHTS:
        whole = module._parameters.get(weight)
        if whole is not None:
            part = whole.detach().index_select(0, mine.to(whole.device))
            module._parameters[weight] = nn.Parameter(part, requires_grad=False)
            parts.note(module, weight, parts.Taken(0, mine, experts))
    module.num_experts, module._is_expert_parallel = local, True
    tables(module, experts, shard, module.down_proj.device)


def tables(module: Any, experts: int, shard: Shard, device: torch.device) -> None:
    """Give a mixture the tables that say where its experts are.

    Args:
        experts: number of all experts.
    """
    placement = first_placement(experts, experts + shard.redundant_experts)
    places = places_of(placement, experts)
    buffers = ((PLACEMENT, placement, torch.int64), (PLACES, places, torch.int64), (LOCAL, places, torch.int32))
    for buffer, like, dtype in buffers:
        module.register_buffer(buffer, torch.zeros(like.shape, dtype=dtype, device=device), persistent=False)
    if shard.count_experts:
        module.register_buffer(LOADS, torch.zeros(experts, dtype=torch.int64, device=device), persistent=False)
    if device.type != "meta":
        place(module, placement, shard.expert_rank)


def first_placement(experts: int, slots: int) -> np.ndarray[Any, Any]:
    """Return the expert of each slot [slots] int64 before loads are known."""
    return np.arange(slots, dtype=np.int64) % experts


def places_of(placement: np.ndarray[Any, Any], experts: int) -> np.ndarray[Any, Any]:
    """Return slots of each expert [experts, w] int64 for the tokens in turn."""
    width = 1 if len(placement) == experts else _COPIES
    places = np.empty((experts, width), dtype=np.int64)
    for expert in range(experts):
        places[expert] = np.resize(np.flatnonzero(placement == expert), width)
    return places


def place(module: Any, placement: np.ndarray[Any, Any], rank: int) -> None:
    """Let the tables of a mixture say where its experts are. Their addresses stay.

    Args:
        placement: the expert of each slot, [slots] int64.
    """
    local = module.num_experts
    places = places_of(placement, module.slotline_places.shape[0])
    own = places - rank * local
    own[(own < 0) | (own >= local)] = local
    for name, table in ((PLACEMENT, placement), (PLACES, places), (LOCAL, own)):
        getattr(module, name).copy_(torch.from_numpy(table))
