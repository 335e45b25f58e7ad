"""Linear layers on a CPU with the weight in the layout that is fastest for its shape: oneDNN's blocked one, or its own.

One copy is used for every number of tokens, and the original weight is freed. `docs/decisions/cpu-linear.md` has the
measurements.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional

from slotline.plugins.model_families.passes.cpu_products import ONEDNN, Way
from slotline.plugins.model_families.passes.few_rows import (
    ADD,
    MOST_ROWS,
    MULTIPLY,
    NOTHING,
    SWISH,
    dense_kernels,
    panel_kernels,
)
from slotline.plugins.model_families.passes.target import Target, slots

PACKED_FOR_TOKENS = 16
"""The number of tokens that the layout is chosen for. Any from 2 up gives the same layout; 1 gives a plain one, which
is slow for all others."""

TIED_COPY_LIMIT = 1 << 30
"""Bytes that packing an output projection tied to the embedding may cost: the embedding keeps its own copy."""

_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight [out_features, in_features] in oneDNN's blocked layout, an opaque tensor of the same shape.

    A weight on the meta device is returned as it is.
    """
    if weight.is_meta:
        return weight.detach()
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_FOR_TOKENS)
    return packed


class PackedLinear(nn.Module):
    """Linear layer with a packed weight.

    Attributes:
        in_features, out_features: sizes.
        way: how the weight is held and multiplied.
        packed: buffer, the weight in the way's layout. `copy_` from another packed weight of the same shape reloads it.
        bias: [out_features] or None.
    """

    packed: torch.Tensor
    bias: nn.Parameter | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, way: Way = ONEDNN) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.way = way
        self._plain = way.layout == "plain"
        self._own = self._plain or "panels" in way.kernels
        self._few = [way.kernel(rows) for rows in range(MOST_ROWS + 1)]
        self._placed: torch.Tensor | None = None  # the tensor whose address is known
        self._panels = 0
        self._room: object = None
        self.register_buffer("packed", self.pack(weight), persistent=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out_features, in_features]: a copy, made anew at each access, where it is in oneDNN's layout."""
        return self.packed if self._plain else self.packed.to_dense()

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight [out_features, in_features] in this layer's layout."""
        return weight.detach().contiguous() if self._plain else pack(weight)

    def move(self, packed: torch.Tensor, room: object) -> None:
        """Take a copy of the weight in the same layout instead, and keep the memory that it is in."""
        self.packed, self._room = packed, room

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features], summed in float32."""
        if self._own and (own := self._product(x)) is not None:
            return own
        # Straight from the dictionaries: attribute access of modules costs more than the rest of this call.
        result: torch.Tensor = _linear(x, self._buffers["packed"], self._parameters["bias"], "none", [], "")
        return result

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the output for x, added to a residual of the output's shape as the product's last step."""
        if self._own and (own := self._product(x, residual, ADD)) is not None:
            return own
        result: torch.Tensor = _linear_binary(x, residual, self._buffers["packed"], self._parameters["bias"], "add")
        return result

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the output for x, multiplied by another tensor of the output's shape as the product's last step."""
        if self._own and (own := self._product(x, other, MULTIPLY)) is not None:
            return own
        result: torch.Tensor = _linear_binary(x, other, self._buffers["packed"], self._parameters["bias"], "mul")
        return result

    def activated(self, x: torch.Tensor, operation: str, algorithm: str) -> torch.Tensor:
        """Return an activation of the output for x, by oneDNN's names, as the product's last step."""
        if self._own and operation == "swish" and (own := self._product(x, None, SWISH)) is not None:
            return own
        if not self._plain:
            weight, bias = self._buffers["packed"], self._parameters["bias"]
            result: torch.Tensor = _linear(x, weight, bias, operation, [], algorithm)
            return result
        product = self.forward(x)
        return product.relu_() if operation == "relu" else functional.gelu(product, approximate=algorithm)

    def addresses(self, rows: int) -> tuple[int, int] | None:
        """Return the addresses of our kernel of so many rows, as `dense_kernels.run_product` has it, and of the weight.

        None where the product is a library's, or takes its input in another dtype.
        """
        weight, narrow = self._buffers["packed"], self.packed.dtype == torch.bfloat16
        kernel = self._few[rows] if self._own and 0 < rows <= MOST_ROWS else ""
        if kernel == "panels" and (not narrow or dense_kernels().adds_pairs()):
            found = panel_kernels().compile_product(narrow=narrow, paired=narrow)
            return found.address, panel_kernels().address_of(weight)
        if kernel == "numba" and (not narrow or dense_kernels().takes_pairs(self.in_features)):
            found = dense_kernels().compile_product(narrow=narrow, paired=narrow)
            return found.address, weight.data_ptr()  # type: ignore[union-attr]
        return None

    def _product(self, x: torch.Tensor, other: torch.Tensor | None = None, mode: int = NOTHING) -> torch.Tensor | None:
        """Return the output for x with what is done last, None where that is oneDNN's to compute."""
        weight, bias = self._buffers["packed"], self._parameters["bias"]
        rows = x.numel() // self.in_features
        if 0 < rows <= MOST_ROWS and x.dtype == weight.dtype:  # type: ignore[union-attr]
            kernel = self._few[rows]
            if kernel == "panels":
                if self._placed is not weight:
                    self._placed, self._panels = weight, panel_kernels().address_of(weight)
                return panel_kernels().few_rows(x, self._panels, self.out_features, bias, other, mode)  # type: ignore[no-any-return]
            if kernel == "numba":
                return dense_kernels().few_rows(x, weight, bias, other, mode)  # type: ignore[no-any-return]
        if not self._plain:
            return None
        product = functional.linear(x, weight, bias)  # type: ignore[arg-type]
        if mode == ADD:
            return product.add_(other)  # type: ignore[arg-type]
        if mode == MULTIPLY:
            return product.mul_(other)  # type: ignore[arg-type]
        return functional.silu(product, inplace=True) if mode == SWISH else product

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, layout={self.way.layout}"


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Pack every plain linear layer that is left."""
    if not target.packs:
        return (f"linear layers not packed: no oneDNN kernels for {target.dtype} on {target.device}",)
    shared = _shared_weights(model)
    notes: list[str] = []
    count = 0
    for parent, name, child in slots(model):
        if not is_plain_linear(child, target):
            continue
        if id(child.weight) in shared:
            size = child.weight.numel() * child.weight.itemsize
            if size > TIED_COPY_LIMIT:
                notes.append(f"{name} not packed: it is tied, and a second copy would take {size >> 20} MiB")
                continue
            notes.append(f"{name} is tied: packing costs a second copy of {size >> 20} MiB")
        way = target.way(child.weight)
        own = child.weight.clone() if id(child.weight) in shared and way.layout == "plain" else child.weight
        setattr(parent, name, PackedLinear(own, child.bias, way))
        count += 1
    return (f"packed {count} linear layers", *notes, *layouts(model))


def layouts(model: nn.Module) -> tuple[str, ...]:
    """Return a note on the layers that are in their own layout."""
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    plain = sum(module.way.layout == "plain" for module in linears)
    return (f"{plain} of {len(linears)} packed layers stay in their own layout: `slotline explain`",) if plain else ()


def is_plain_linear(module: nn.Module | None, target: Target) -> TypeGuard[nn.Linear]:
    """Return True if a module is exactly torch's linear layer in the target's dtype, without hooks."""
    return type(module) is nn.Linear and module.weight.dtype == target.dtype and not has_hooks(module)


def is_untouched(module: nn.Module | None) -> TypeGuard[PackedLinear]:
    """Return True if a module is a packed linear layer that may be computed without calling it."""
    return type(module) is PackedLinear and not module._forward_hooks and not module._forward_pre_hooks


def has_hooks(module: nn.Module) -> bool:
    """Return True if the module has forward hooks or a replaced forward, so that it must be called."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _shared_weights(model: nn.Module) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            (shared if id(weight) in seen else seen).add(id(weight))
    return shared
