"""Projections of the same input as one matrix product: query, key and value; gate and up.

The modules stay where their parent looks for them. The first one that is called with a tensor computes all outputs. The
others return their part if they are called with the same tensor object. A call with another tensor starts again, so the
result never depends on the order or the number of calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from slotline.plugins.model_families.passes.kernels import FusedKernels
from slotline.plugins.model_families.passes.packed_linear import PackedLinear, is_plain_linear
from slotline.plugins.model_families.passes.target import Target

QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
ENCODER_QUERY_KEY_VALUE = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
"""Names of BERT and its kin, and of DistilBERT."""
GATE_UP = ("gate_proj", "up_proj")


class PlainMerged(nn.Module):
    """The merged projection where weights are not packed, by torch's product or the device's own.

    Attributes:
        linear: that product, of inputs, weight and bias.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, fused: FusedKernels | None) -> None:
        super().__init__()
        self.linear: Callable[..., torch.Tensor] = functional.linear if fused is None else fused.linear
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., all out_features]."""
        return self.linear(x, self.weight, self.bias)


class _Shared:
    """Merged layer and the parts of its last output that were not taken yet."""

    __slots__ = ("linear", "parts", "sizes", "version", "x")

    def __init__(self, linear: nn.Module, sizes: list[int]) -> None:
        self.linear, self.sizes = linear, sizes
        self.x: torch.Tensor | None = None
        self.version = 0
        self.parts: list[torch.Tensor | None] = []

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor:
        # The reference kept in self.x makes `is` safe; the version tells of writes, which inference tensors hide.
        if self.x is not x or self.version != _version(x) or self.parts[index] is None:
            self.parts = list(self.linear(x).split(self.sizes, -1))
            self.x, self.version = x, _version(x)
        part = self.parts[index]
        self.parts[index] = None
        if not any(other is not None for other in self.parts):
            self.x = None
        return part  # type: ignore[return-value]


class MergedProjection(nn.Module):
    """One of several projections that share a matrix product.

    The outputs are views into one tensor [..., all out_features]: contiguous in the last dimension only.

    Attributes:
        in_features, out_features: sizes of this projection.
        index: its place among its siblings in the merged output.
    """

    def __init__(self, shared: _Shared, index: int, in_features: int) -> None:
        super().__init__()
        self.index = index
        self.in_features, self.out_features = in_features, shared.sizes[index]
        if index == 0:
            self.merged = shared.linear  # one place in the module tree, so that its weights are listed once
        self._shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return self._shared.take(self.index, x)

    @property
    def shared_linear(self) -> nn.Module:
        """The layer that computes all siblings at once."""
        return self._shared.linear

    @property
    def weight(self) -> torch.Tensor:
        """Weight of this projection, [out_features, in_features], a copy if weights are packed."""
        start = sum(self._shared.sizes[: self.index])
        whole: torch.Tensor = self._shared.linear.weight  # type: ignore[assignment]
        return whole[start : start + self.out_features]


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Merge the projections of every module that has all plain ones of equal input.

    Gate and up are merged where a kernel takes them merged.
    """
    notes = _merge_all(model, QUERY_KEY_VALUE, "q, k, v", target)
    return notes + _merge_all(model, GATE_UP, "gate, up", target) if target.fused is not None else notes


def apply_to_encoder(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Merge query, key and value of every attention module of an encoder."""
    notes: tuple[str, ...] = ()
    for names in ENCODER_QUERY_KEY_VALUE:
        notes += _merge_all(model, names, "q, k, v", target)
    return notes


def merged_of(module: nn.Module, fused_name: str, siblings: tuple[str, ...]) -> Callable[..., torch.Tensor] | None:
    """Return the module's single projection, separate or merged from siblings, if no sibling has hooks.

    The projection itself may have hooks. It must be called as a module then.
    """
    children = module._modules
    whole = children.get(fused_name)
    if type(whole) in (PackedLinear, nn.Linear):
        return whole
    for name in siblings:
        part = children.get(name)
        if type(part) is not MergedProjection or part._forward_hooks or part._forward_pre_hooks:
            return None
    return part.shared_linear  # type: ignore[union-attr,return-value]


def _merge_all(model: nn.Module, names: tuple[str, ...], title: str, target: Target) -> tuple[str, ...]:
    count = 0
    for module in list(model.modules()):
        children = (module._modules.get(name) for name in names)
        linears = [child for child in children if is_plain_linear(child, target)]
        count += len(linears) == len(names) and _merge(module, names, linears, target)
    return (f"merged {title} projections in {count} layers",) if count else ()


def _merge(module: nn.Module, names: tuple[str, ...], linears: list[nn.Linear], target: Target) -> bool:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len({linear.in_features for linear in linears}) != 1 or len(biases) not in (0, len(linears)):
        return False
    weight = torch.cat([linear.weight.detach() for linear in linears])  # [all out_features, in_features]
    bias = torch.cat([bias.detach() for bias in biases]) if biases else None  # [all out_features]
    merged = PackedLinear(weight, bias, target.way(weight)) if target.packs else PlainMerged(weight, bias, target.fused)
    sizes = [linear.out_features for linear in linears]
    for name, projection in zip(names, share(merged, sizes, linears[0].in_features), strict=True):
        setattr(module, name, projection)
    return True


def share(merged: nn.Module, sizes: list[int], in_features: int) -> tuple[MergedProjection, ...]:
    """Return projections of these sizes that share the product of one layer."""
    shared = _Shared(merged, sizes)
    return tuple(MergedProjection(shared, index, in_features) for index in range(len(sizes)))


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version
