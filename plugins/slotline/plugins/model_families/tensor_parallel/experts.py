"""Division of mixtures: each rank has a part of every expert's intermediate numbers, or some experts whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slotline.plugins.model_families.tensor_parallel import expert_parallel, mlps
from slotline.plugins.model_families.tensor_parallel.pieces import Cut, Section, halves, only_first, plain, rescale
from slotline.plugins.model_families.tensor_parallel.work import UnknownPartError, Work, parameters_of

SHARED = ("shared_expert", "shared_experts", "shared_mlp")
ROUTERS = ("gate", "router", "shared_expert_gate")
SIZES = ("intermediate_size", "intermediate_dim", "expert_dim", "moe_intermediate_size", "ffn_hidden_size")
TRANSPOSED = ("Llama4TextExperts",)
"""Classes with weights [experts, inputs, outputs] that do not say so."""


def is_experts(module: Any) -> bool:
    """Return True for a module that has the weights of all experts in one tensor."""
    down = module._parameters.get("down_proj")
    return (down is not None and down.dim() == 3) or _is_dbrx(module)


def divide_block(work: Work, name: str, block: Any) -> bool:
    """Divide a block of routed and shared experts, whose parts are summed once, and return whether it is one.

    Raises:
        NegotiationError: if an expert cannot be divided.
    """
    routed = [(one, child) for one, child in block._modules.items() if child is not None and is_experts(child)]
    shared = [(one, block._modules[one]) for one in SHARED if block._modules.get(one) is not None]
    if len(routed) != 1 or len(shared) != 1 or routed[0][1] in work.done:
        return False
    known = {routed[0][1], shared[0][1], *(block._modules.get(one) for one in ROUTERS)}
    if mlps.others(block, known):  # as a norm of the sum
        return False
    title = f"{name}.{routed[0][0]}"
    if not _divide(work, title, routed[0][1]):
        return True
    if mlps.divide(work, f"{name}.{shared[0][0]}", shared[0][1], joined=False):
        work.joined.summed.append(name)
    else:
        work.joined.summed.append(title)
    return True


def divide(work: Work, name: str, module: Any) -> None:
    """Divide experts whose sum is joined at once.

    Raises:
        NegotiationError: if they cannot be divided.
    """
    if _divide(work, name, module):
        work.joined.summed.append(name)


def _divide(work: Work, name: str, module: Any) -> bool:
    if work.shard.experts and expert_parallel.is_mixture(module):
        expert_parallel.own(module, name, work.shard)
        work.joined.mixtures.append(name)
        work.finish(module)
        return True
    try:
        (_divide_dbrx if _is_dbrx(module) else _divide_experts)(work, name, module)
    except UnknownPartError as unknown:
        work.leave(name, module, f"since {unknown}")
        return False
    work.finish(module)
    return True


def _divide_experts(work: Work, name: str, module: Any) -> None:
    inner = [one for one in ("gate_up_proj", "gate_proj", "up_proj") if module._parameters.get(one) is not None]
    known = {*inner, "down_proj", *(f"{one}_bias" for one in (*inner, "down_proj"))}
    unknown = [one for one in parameters_of(module) if one not in known]
    if unknown or not inner:
        raise UnknownPartError(f"its {unknown[0] if unknown else 'experts'} is not known")
    if getattr(module, "has_post_expert_norm", False):
        raise UnknownPartError("each expert norms its output")
    transposed = getattr(module, "is_transposed", False) or type(module).__name__ in TRANSPOSED
    width = module.down_proj.shape[1 if transposed else 2]
    for one in inner:
        cut = plain(width)
        if one == "gate_up_proj":
            apart = getattr(module, "is_concatenated", True)
            cut = halves(2 * width) if apart else Cut.of(Section(width, 2))
        if getattr(module, one).shape[2 if transposed else 1] != cut.size:
            raise UnknownPartError(f"its {one} has another size than its down_proj")
        work.tensor(name, module, one, cut, 2 if transposed else 1)
        work.tensor(name, module, f"{one}_bias", cut, 1)
    work.tensor(name, module, "down_proj", plain(width), 1 if transposed else 2)
    if module._parameters.get("down_proj_bias") is not None:
        only_first(module, "down_proj_bias", work.shard)
    identity = module._modules.get("identity_expert")
    if identity is not None and work.shard.rank > 0:
        module.identity_expert = Nothing()
    rescale(module, ((SIZES, width, module.down_proj.shape[1 if transposed else 2]),))


class Nothing(nn.Module):
    """Expert that gives zeros: the one that gives its input counts on rank 0 alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return zeros like x."""
        return torch.zeros_like(x)


def _is_dbrx(module: Any) -> bool:
    inner = module._modules.get("mlp")
    return type(module).__name__ == "DbrxExperts" and inner is not None and "w1" in inner._parameters


def _divide_dbrx(work: Work, name: str, module: Any) -> None:
    """Divide DBRX's experts, which lie behind each other in one dimension."""
    width = module.ffn_hidden_size
    cut = Cut((Section(width),) * module.num_experts)
    for one in ("w1", "v1", "w2"):
        work.tensor(f"{name}.mlp", module.mlp, one, cut)
    own = module.mlp.w1.shape[0] // module.num_experts
    rescale(module, ((SIZES, width, own),))
    rescale(module.mlp, ((SIZES, width, own),))
