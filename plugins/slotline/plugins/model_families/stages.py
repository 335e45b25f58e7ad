"""A model over pipeline stages: each layer on its stage's device, and what crosses from one to the next.

The first stage has the embedding, the last the final norm and the output projection. A later stage rotates queries and
keys with its own rotary frequencies, registered next to the model's so that reloading finds them by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from attrs import define
from torch import nn
from torch.utils._pytree import tree_map_only

from slotline.registry.contracts.model_family import Stage

ROTARY = "rotary_emb"


def device_scope(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current device, which Triton launches on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@define(eq=False)
class Part:
    """The layers `first` .. `end` - 1 of a model and the device that they lie on.

    Attributes:
        rotary: the name of the part's rotary embedding in the base model.
        alone: True if this is the whole model, so that nothing is copied and the caller's device is the current one.
    """

    device: torch.device
    first: int
    end: int
    rotary: str = ROTARY
    alone: bool = True

    def scope(self) -> AbstractContextManager[Any]:
        """Set the current device while the part's layers run."""
        return nullcontext() if self.alone else device_scope(self.device)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the part's device.

        The copy is ordered after the tensor's computation, and the host never waits.
        """
        return tensor if self.alone else tensor.to(self.device, non_blocking=True)


def parts_of(hf_model: Any, device: str, stages: Sequence[Stage]) -> tuple[Part, ...]:
    """Return the parts of a model: one for each stage, or the whole on `device`."""
    if not stages:
        return (Part(torch.device(device), 0, len(getattr(hf_model.base_model, "layers", ()))),)
    return tuple(
        Part(torch.device(s.device), s.first_layer, s.end_layer, f"{ROTARY}_{i}" if i else ROTARY, alone=False)
        for i, s in enumerate(stages)
    )


def separate(hf_model: Any, parts: Sequence[Part]) -> None:
    """Give each part what it would share with another: rotary frequencies, and a weight tied to the embedding.

    Names of parameters and buffers then do not depend on the devices.
    """
    if len(parts) < 2:
        return
    base, head = hf_model.base_model, getattr(hf_model, "lm_head", None)
    rotary = getattr(base, ROTARY, None)
    for part in parts[1:] if rotary is not None else ():
        base.add_module(part.rotary, deepcopy(rotary))
    if head is not None and head.weight is base.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)


def place(hf_model: Any, parts: Sequence[Part]) -> None:
    """Move every module of a separated model to its part's device."""
    for index, part in enumerate(parts):
        for _, _, module in _own(hf_model, parts, index):
            module.to(part.device)


def stage_of(hf_model: Any, parts: Sequence[Part]) -> dict[int, int]:
    """Return the part of every module, by the module's id."""
    return {
        id(module): index
        for index in range(len(parts))
        for _, _, own in _own(hf_model, parts, index)
        for module in own.modules()
    }


@contextmanager
def only(hf_model: Any, parts: Sequence[Part], index: int) -> Iterator[None]:
    """Hide the other parts from traversals of the model, with the part's device as the current one.

    A module that is replaced meanwhile stays replaced.
    """
    base, rotary = hf_model.base_model, parts[index].rotary
    own = {(id(holder), name) for holder, name, _ in _own(hf_model, parts, index)}
    holders = tuple(dict.fromkeys((hf_model, base, base.layers)))  # a model without a head is its own base
    before = [dict(holder._modules) for holder in holders]
    for holder, children in zip(holders, before, strict=True):
        for name, child in children.items():
            if (id(holder), name) not in own and child is not base and child is not base.layers:
                del holder._modules[name]
    if rotary in base._modules:
        base._modules[ROTARY] = base._modules[rotary]
    try:
        with device_scope(parts[index].device):
            yield
    finally:
        for holder, children in zip(holders, before, strict=True):
            replaced = {name: holder._modules[name] for name in children if (id(holder), name) in own}
            holder._modules.clear()
            holder._modules.update(children | replaced)


class Crossing:
    """Lets transformers' own forward cross from part to part: hooks move what a later part's layers are given.

    The rotary embeddings of the first part are then copied for each layer, so our loop, which needs no hooks, is
    faster.
    """

    def __init__(self, hf_model: Any, parts: Sequence[Part]) -> None:
        self._first = parts[0]
        self._hooks = [
            layer.register_forward_pre_hook(partial(_enter, part), with_kwargs=True)
            for part in parts[1:]
            for layer in hf_model.base_model.layers[part.first : part.end]
        ]

    def scope(self) -> AbstractContextManager[Any]:
        """Restore the current device after each forward."""
        return self._first.scope()

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


def _enter(part: Part, _: nn.Module, args: Any, options: Any) -> Any:
    if part.device.type == "cuda":
        torch.cuda.set_device(part.device)
    return tree_map_only(torch.Tensor, part.receive, (args, options))


def _own(hf_model: Any, parts: Sequence[Part], index: int) -> Iterator[tuple[Any, str, nn.Module]]:
    """Yield the modules of one part, each with its parent module and its name there."""
    return own_modules(hf_model, parts[index], is_first=index == 0, is_last=index == len(parts) - 1)


def own_modules(hf_model: Any, part: Part, *, is_first: bool, is_last: bool) -> Iterator[tuple[Any, str, nn.Module]]:
    """Yield the modules of a part, each with its parent module and its name there."""
    base = hf_model.base_model
    for name, child in hf_model.named_children() if hf_model is not base else ():  # a head
        if is_last and child is not base:
            yield hf_model, name, child
    for name, child in base.named_children():
        if name.startswith(ROTARY):
            is_own = name == part.rotary
        elif child is base.norm:
            is_own = is_last
        else:
            is_own = is_first and child is not base.layers
        if is_own:
            yield base, name, child
    for number in range(part.first, part.end):
        yield base.layers, str(number), base.layers[number]
