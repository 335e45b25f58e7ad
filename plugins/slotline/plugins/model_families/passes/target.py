"""Target of the passes: the device, the dtype, and their kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import field, frozen
from torch import nn

from slotline.kernels.triton_support import has_triton
from slotline.plugins.model_families.passes.cpu_products import Choice, Way, way_for
from slotline.plugins.model_families.passes.decisions import Decisions
from slotline.plugins.model_families.passes.kernels import FusedKernels, RowKernels
from slotline.registry.errors import ModelError

PACKABLE = (torch.float32, torch.bfloat16)
"""Dtypes with oneDNN packed kernels; float16 needs AVX-512 FP16 and is slower than plain torch without it."""

OLDEST_GPU = (8, 0)
"""The compute capability from which Triton's kernels are used; older ones lack instructions for bfloat16."""


@frozen
class Target:
    """Device and dtype of an optimised model.

    Attributes:
        device: device type, ``cpu`` or ``cuda``.
        dtype: the weights' dtype.
        kernels: the device's row kernels, None if there are none.
        fused: the same object if the device has fused kernels, too.
        products: how a CPU's products are chosen.
        joins: whether one kernel may compute all between two attentions.
        decisions: answers of the passes' checks.
    """

    device: str
    dtype: torch.dtype
    kernels: RowKernels | None = None
    fused: FusedKernels | None = None
    products: Choice = "onednn"
    joins: bool = True
    decisions: Decisions = field(factory=Decisions, eq=False)

    @property
    def packs(self) -> bool:
        """True if linear layers can hold their weight in oneDNN's blocked layout."""
        return self.device == "cpu" and self.dtype in PACKABLE and _has_packed_kernels(self.dtype)

    def way(self, weight: torch.Tensor) -> Way:
        """Return how a weight [out_features, in_features] is multiplied where `packs`."""
        out_features, in_features = weight.shape
        return way_for(self.products, out_features, in_features, weight.dtype)


def target_of(device: str, dtype: str | torch.dtype) -> Target:
    """Return the target for a device, e.g. ``cuda:0``, and a dtype or its name.

    Raises:
        ModelError: if the dtype's name is unknown.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ModelError(f"dtype {dtype!r} is no dtype for weights", fix="use float32, bfloat16 or float16")
    kind = torch.device(device).type
    if kind == "cpu" and found in PACKABLE:
        from slotline.plugins.model_families.passes.cpu_kernels import CpuKernels

        return Target(kind, found, CpuKernels(found))
    if kind == "cuda" and _has_triton(device):
        from slotline.plugins.model_families.passes.fused_kernels import triton_kernels_for

        fused = triton_kernels_for(device)
        return Target(kind, found, fused, fused)
    return Target(kind, found)


def slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Return every (parent, attribute name, child) of the model, listed first, so that children may be replaced."""
    yield from [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]


def _has_triton(device: str) -> bool:
    if not torch.cuda.is_available() or not has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST_GPU


def _has_packed_kernels(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
