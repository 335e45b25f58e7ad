"""Places of a divided decoder where hidden states of own tokens become those of all, and sums become own tokens.

A decoder layer is known by its children. Those that mix tokens or have divided weights are given all tokens, and the
sum that they end in is scattered. All others, as norms, see a rank's own tokens. So whatever a layer adds, multiplies
or norms between them works on own tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from attrs import frozen
from torch import nn

from slotline.planner.ranks import SEQUENCE
from slotline.plugins.model_families.passes.lean_layer import LeanLayer
from slotline.plugins.model_families.tensor_parallel.experts import ROUTERS, is_experts
from slotline.plugins.model_families.tensor_parallel.joined import Joined
from slotline.plugins.model_families.tensor_parallel.mlps import others
from slotline.plugins.model_families.tensor_parallel.token_division import Gathering, TokenDivision
from slotline.registry.errors import NegotiationError


@frozen
class Branch:
    """Child of a decoder layer that is given all tokens.

    Attributes:
        name: its path.
        inner: path of the module in it whose outputs are parts of a sum, None if each rank has the child whole.
        outer: path of the module behind which the sum is made.
    """

    name: str
    inner: str | None
    outer: str


def branches(hf_model: Any, joined: Joined, mixing: Collection[str]) -> list[Branch]:
    """Return the children of a divided model's decoder layers that are given all tokens.

    Args:
        mixing: paths of modules that mix tokens, or of tensors in them.

    Raises:
        NegotiationError: naming what does not fit.
    """
    base = hf_model.base_model
    names = {module: name for name, module in hf_model.named_modules()}
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise refusal(hf_model, "it has no list of decoder layers")
    found: list[Branch] = []
    for layer in layers:
        for child in layer.children():
            found += _branch(hf_model, names[child], joined, mixing)
    begins = tuple(f"{one.name}." for one in found)
    inside = tuple(f"{names[layer]}." for layer in layers)
    for name in (*joined.summed, *mixing):
        if not f"{name}.".startswith(begins) and (name in joined.summed or f"{name}.".startswith(inside)):
            raise refusal(hf_model, f"{name!r} is no part of a layer's attention, mixer or MLP")
    return found


def refusal(hf_model: Any, said: str) -> NegotiationError:
    """Return the error for a model whose hidden states cannot be divided by tokens."""
    return NegotiationError(
        f"{SEQUENCE} = true: hidden states of {type(hf_model).__name__} cannot be divided by tokens: {said}",
        fix=f"set {SEQUENCE} = false",
    )


def attach(hf_model: Any, found: Collection[Branch], tokens: TokenDivision) -> None:
    """Let the branches be given all tokens, and those that are whole on each rank give own ones."""
    for layer in hf_model.base_model.layers:
        if isinstance(layer.forward, LeanLayer):
            layer.forward.tokens = tokens
    for branch in found:
        module = hf_model.get_submodule(branch.name)
        module.register_forward_pre_hook(Gathering(tokens), with_kwargs=True)
        if branch.inner is None:
            module.register_forward_hook(lambda _module, _given, out: _own(tokens, out))


def _own(tokens: TokenDivision, out: Any) -> Any:
    if not tokens.divided:
        return out
    return (tokens.own(out[0]), *out[1:]) if isinstance(out, tuple) else tokens.own(out)


def _branch(hf_model: Any, name: str, joined: Joined, mixing: Collection[str]) -> Iterator[Branch]:
    """Yield the branch that a child of a layer is, if it is one.

    Raises:
        NegotiationError: if its output is no single sum.
    """
    sums = [one for one in joined.summed if f"{one}.".startswith(f"{name}.")]
    if not sums:
        if any(f"{one}.".startswith(f"{name}.") for one in mixing):
            yield Branch(name, None, name)
        return
    if len(sums) > 1:
        raise refusal(hf_model, f"{name!r} ends in several sums: {', '.join(map(repr, sums))}")
    (inner,) = sums
    child = hf_model.get_submodule(name)
    outer = inner
    if is_experts(hf_model.get_submodule(inner)) and inner != name:
        known = {hf_model.get_submodule(inner), *(child._modules.get(one) for one in ROUTERS)}
        if strange := others(child, known):
            raise refusal(hf_model, f"{name!r} has {strange[0]!r} beside its experts, whose sum is made before")
        outer = name
    elif inner not in (name, f"{name}.{inner.rpartition('.')[2]}"):
        raise refusal(hf_model, f"the sum of {inner!r} is made within a part of {name!r}")
    yield Branch(name, inner, outer)
