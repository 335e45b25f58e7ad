"""Collectives behind the modules of a divided model.

They are forward hooks, put in place after the passes: those look at plain layers, and call a layer with hooks as a
module. An adapter's product joins before the hook.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from slotline.plugins.model_families.tensor_parallel import norms
from slotline.plugins.model_families.tensor_parallel.expert_routing import OwnTokens, SameTokens
from slotline.plugins.model_families.tensor_parallel.joined import Joined
from slotline.registry.contracts.communicator import Communicator

__all__ = ["Joined", "install"]


def install(hf_model: nn.Module, joined: Joined, communicator: Communicator, *, fused: bool = False) -> None:
    """Let the modules' outputs be joined.

    Args:
        fused: whether our kernels may be used.
    """
    for name in joined.summed:
        hf_model.get_submodule(name).register_forward_hook(partial(_sum, communicator))
    for name, (start, end) in joined.embeddings.items():
        _VocabularyPart(start, end, communicator).attach(hf_model.get_submodule(name))
    for name, size in joined.gathered.items():
        hf_model.get_submodule(name).register_forward_hook(partial(_gather, communicator, size))
    form = OwnTokens if joined.own_tokens else SameTokens
    for name in joined.mixtures:
        module: Any = hf_model.get_submodule(name)
        module.forward = form(module, communicator, fused=fused)
    norms.connect(hf_model.get_submodule, joined.joining, communicator)


def _sum(communicator: Communicator, _module: nn.Module, _given: Any, out: Any) -> Any:
    if isinstance(out, tuple):
        return communicator.all_reduce(out[0].contiguous()), *out[1:]
    return communicator.all_reduce(out.contiguous())


def _gather(communicator: Communicator, size: int, _module: nn.Module, _given: Any, out: torch.Tensor) -> torch.Tensor:
    """Return logits [.., size] of the ranks' parts."""
    return communicator.all_gather(out.contiguous(), -1)[..., :size]


class _VocabularyPart:
    """Hooks of an embedding that has the tokens `start` .. `end` - 1."""

    def __init__(self, start: int, end: int, communicator: Communicator) -> None:
        self._start, self._end, self._communicator = start, end, communicator

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, with_kwargs=False)

    def _before(self, module: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ids = given[0]
        module.slotline_outside = (ids < self._start) | (ids >= self._end)
        return (ids - self._start).masked_fill(module.slotline_outside, 0), *given[1:]

    def _after(self, module: nn.Module, _given: Any, out: torch.Tensor) -> torch.Tensor:
        outside: Any = module.slotline_outside
        del module.slotline_outside
        return self._communicator.all_reduce(out.masked_fill(outside[..., None], 0.0))
