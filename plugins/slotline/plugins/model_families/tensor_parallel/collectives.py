"""Collectives behind the modules of a divided model.

They are forward hooks, put in place after the passes: those look at plain layers, and call a layer with hooks as a
module. An adapter's product joins before the hook.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from slotline.plugins.model_families.tensor_parallel import norms, sequence
from slotline.plugins.model_families.tensor_parallel.expert_routing import Column, OwnTokens, SameTokens
from slotline.plugins.model_families.tensor_parallel.joined import Joined
from slotline.plugins.model_families.tensor_parallel.token_division import TokenDivision
from slotline.registry.contracts.communicator import Communicator

__all__ = ["Joined", "install"]


def install(
    hf_model: Any,
    joined: Joined,
    communicator: Communicator,
    replicas: Communicator | None = None,
    *,
    fused: bool = False,
    mixing: Collection[str] | None = None,
) -> TokenDivision:
    """Let the modules' outputs be joined.

    Args:
        communicator: of the ranks that divide layers.
        replicas: of the ranks with the same part of them, whose mixtures share experts. None if there are no others.
        fused: whether our kernels may be used.
        mixing: names of the layers that mix tokens, if hidden states are divided by tokens. None if they are whole.

    Returns:
        What divides the tokens of a step.

    Raises:
        NegotiationError: if hidden states cannot be divided.
    """
    tokens, places = TokenDivision(), dict[str, str]()
    if mixing is not None:
        tokens, found = TokenDivision(communicator), sequence.branches(hf_model, joined, mixing)
        places = {branch.inner: branch.outer for branch in found if branch.inner is not None}
        sequence.attach(hf_model, found, tokens)
    for name in joined.within:
        hf_model.get_submodule(name).register_forward_hook(partial(_sum, communicator.all_reduce))
    for name in joined.summed:
        join = tokens.sum if name in places else communicator.all_reduce
        hf_model.get_submodule(places.get(name, name)).register_forward_hook(partial(_sum, join))
    _join_embeddings(hf_model, joined, communicator, tokens)
    for name, size in joined.gathered.items():
        hf_model.get_submodule(name).register_forward_hook(partial(_gather, communicator, size))
    form = OwnTokens if joined.own_tokens else SameTokens
    column = Column() if replicas is None else Column(communicator.rank, communicator.size)
    for name in joined.mixtures:
        module: Any = hf_model.get_submodule(name)
        module.forward = form(module, replicas or communicator, column, fused=fused)
    norms.connect(hf_model.get_submodule, joined.joining, communicator)
    return tokens


def _join_embeddings(hf_model: Any, joined: Joined, communicator: Communicator, tokens: TokenDivision) -> None:
    """Let embeddings be joined. Those before the first layer are of own tokens where these are divided."""
    first = hf_model.base_model._modules.get("embed_tokens") if tokens.divides else None
    for name, (start, end) in joined.embeddings.items():
        module = hf_model.get_submodule(name)
        _VocabularyPart(start, end, tokens.sum if module is first else communicator.all_reduce).attach(module)
        first = None if module is first else first
    if first is not None:
        first.register_forward_hook(lambda _module, _given, out: tokens.own(out) if tokens.divided else out)


def _sum(join: Callable[[torch.Tensor], torch.Tensor], _module: nn.Module, _given: Any, out: Any) -> Any:
    return (join(out[0].contiguous()), *out[1:]) if isinstance(out, tuple) else join(out.contiguous())


def _gather(communicator: Communicator, size: int, _module: nn.Module, _given: Any, out: torch.Tensor) -> torch.Tensor:
    """Return logits [.., size] of the ranks' parts."""
    return communicator.all_gather(out.contiguous(), -1)[..., :size]


class _VocabularyPart:
    """Hooks of an embedding that has the tokens `start` .. `end` - 1."""

    def __init__(self, start: int, end: int, join: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._start, self._end, self._join = start, end, join

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
        return self._join(out.masked_fill(outside[..., None], 0.0))
