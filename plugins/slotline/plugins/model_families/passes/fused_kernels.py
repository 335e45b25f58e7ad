"""Launches of the Triton kernels. Implements `kernels.FusedKernels` for any floating dtype."""

from __future__ import annotations

import torch
from torch.nn import functional

from slotline.kernels.gluon_support import HOPPER
from slotline.kernels.triton_launcher import Launcher, cdiv, next_power_of_2
from slotline.plugins.model_families.passes import triton_kernels
from slotline.plugins.model_families.passes.between_attentions import FEWEST_ROWS, MOST_ROWS, BetweenAttentions
from slotline.plugins.model_families.passes.cluster_products import ClusterProducts
from slotline.plugins.model_families.passes.kernels import GatedNorm, LayerWeights, NormWeight
from slotline.plugins.model_families.passes.products import EXTENDED, LARGE, PRODUCT_ROWS, SINGLE, Products
from slotline.registry.contracts.attention import CacheSlots

ACTIVATION_BLOCK = 1024
ROWS_BY_HEAD, MANY_ROWS = 64, 1024
HEADS, MANY_HEADS = 8, 32
"""Up to so many rows a program turns one head, to use many multiprocessors; above, several, to need fewer programs; and
above `MANY_ROWS`, as a prompt has, `MANY_HEADS`."""
MANY_WARPS = 8
"""Most warps of a row's norm above `MANY_ROWS`: 33 us for 8,192 rows of 4,096 instead of 37 with 16."""
EARLIEST = (9, 0)
"""The compute capability from which a kernel may start before the one in front of it ends."""


class TritonKernels:
    """Row kernels on a GPU. They can be captured, and are compiled at their first call for each dtype and width.

    Args:
        early: True if kernels may start early (programmatic dependent launch).
        multiprocessors: see `Products`.
        between: the kernel between two attentions, if the device has it.
    """

    def __init__(
        self, *, early: bool = False, multiprocessors: int = 0, between: BetweenAttentions | None = None
    ) -> None:
        self._between = between
        self._early: dict[str, bool] = {"early": True, "launch_pdl": True} if early else {"early": False}
        self._products = Products(self._early, multiprocessors)
        self._starts = {"launch_pdl": True} if early else {}
        self._cluster = ClusterProducts(early=early, multiprocessors=multiprocessors) if multiprocessors else None
        self._rms_norm = Launcher(triton_kernels.rms_norm)
        self._add_rms_norm = Launcher(triton_kernels.add_rms_norm)
        self._rotate = Launcher(triton_kernels.rotate)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        """See `kernels.RowKernels.rms_norm`."""
        x = x.contiguous()
        out = torch.empty_like(x)
        n = weight.numel()
        grid = (x.numel() // n,)
        padded, warps = _row_sizes(n)
        warps = min(warps, MANY_WARPS) if grid[0] > MANY_ROWS else warps
        self._rms_norm(
            grid, x, weight, out, eps, offset, n, padded, bool(self._starts), num_warps=warps, **self._starts
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, inner: NormWeight | None, outer: NormWeight | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.FusedKernels.add_rms_norm`."""
        n = x.shape[-1]
        rows = residual.numel() // n
        total = torch.empty_like(residual)
        out = total if outer is None else torch.empty_like(residual)
        padded, warps = _row_sizes(n)
        self._add_rms_norm(
            (rows,),
            x,
            residual,
            x if inner is None else inner.weight,
            x if outer is None else outer.weight,
            total,
            out,
            0.0 if inner is None else inner.eps,
            0.0 if inner is None else inner.offset,
            0.0 if outer is None else outer.eps,
            0.0 if outer is None else outer.offset,
            x.stride(-2),
            x.stride(0),
            n,
            padded,
            x.numel() // residual.numel() if rows else 1,
            inner is not None,
            outer is not None,
            bool(self._starts),
            num_warps=warps,
            **self._starts,
        )
        return total, out

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, form: GatedNorm
    ) -> torch.Tensor:
        """See `kernels.FusedKernels.gated_rms_norm`."""
        n, size = weight.numel(), form.group_size
        x, rows_of_gate = x.contiguous(), gate.reshape(-1, n)
        if rows_of_gate.stride(1) != 1:
            rows_of_gate = rows_of_gate.contiguous()
        out = torch.empty_like(x)
        triton_kernels.gated_rms_norm[(x.numel() // n, n // size)](
            x,
            rows_of_gate,
            weight,
            out,
            form.eps,
            n,
            rows_of_gate.stride(0),
            size=size,
            gate_first=form.gate_first,
            **_row_options(size),
            **self._early,
        )
        return out

    def angles(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, width: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.FusedKernels.angles`."""
        cos, sin = torch.empty((2, *positions.shape, width), dtype=dtype, device=positions.device)
        half, padded = frequencies.numel(), next_power_of_2(width)
        positions = positions.contiguous()
        triton_kernels.angles[(positions.numel(),)](
            positions, frequencies, cos, sin, float(scaling), half=half, width=width, padded=padded, **self._early
        )
        return cos, sin

    def rotate(self, states: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> None:
        """See `kernels.RowKernels.rotate`."""
        self.rotate_and_store(states, None, None, heads, 0, cos, sin, rotary_size)

    def rotate_and_store(
        self,
        states: torch.Tensor,
        query: NormWeight | None,
        key: NormWeight | None,
        query_heads: int,
        key_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rotary_size: int,
        slots: CacheSlots | None = None,
    ) -> None:
        """See `kernels.FusedKernels.rotate_and_store`."""
        size = states.shape[-1]
        width = cos.shape[-1]
        rows, turned = cos.numel() // width, query_heads + key_heads
        heads = turned if slots is None else turned + key_heads
        keys, values = (states, states) if slots is None else slots.cache
        strides = (*keys.stride()[:3], *values.stride()[:3])
        most = 1 if rows <= ROWS_BY_HEAD else HEADS if rows <= MANY_ROWS else MANY_HEADS
        block_heads = min(most, next_power_of_2(heads))
        self._rotate(
            (rows, cdiv(heads, block_heads)),
            states,
            cos,
            sin,
            cos if query is None else query.weight,
            cos if key is None else key.weight,
            keys,
            values,
            states if slots is None else slots.slot_mapping,
            0.0 if query is None else query.eps,
            0.0 if query is None else query.offset,
            states.stride(1),
            *strides,
            0 if slots is None else keys.shape[1],
            query_heads,
            turned,
            heads,
            size,
            rotary_size,
            width,
            block_heads,
            next_power_of_2(rotary_size // 2),
            next_power_of_2(max(1, size - rotary_size)),
            query is not None,
            slots is not None,
            bool(self._starts),
            num_warps=1 if block_heads == 1 else 4,
            **self._starts,
        )

    def act_and_mul(self, merged: torch.Tensor, activation: str) -> torch.Tensor:
        """See `kernels.FusedKernels.act_and_mul`."""
        n = merged.shape[-1] // 2
        out = merged.new_empty((*merged.shape[:-1], n))
        block = min(ACTIVATION_BLOCK, next_power_of_2(n))
        grid = (out.numel() // n, cdiv(n, block))
        triton_kernels.act_and_mul[grid](
            merged, out, n, merged.stride(-2), activation=activation, block=block, **self._early
        )
        return out

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: NormWeight | None = None
    ) -> torch.Tensor:
        """See `kernels.FusedKernels.linear`."""
        if self.norms_inside(x):
            return self._products.linear(x, weight, bias, norm)
        x = self._normed(x, norm)
        if self._products.suits(x, weight):
            return self._products.dot(x, weight, bias)[0]
        if self._products.suits_single(x, weight):
            return self._products.dot(x, weight, bias, shape=SINGLE)[0]
        return functional.linear(x, weight, bias)

    def linear_parts(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `kernels.FusedKernels.linear_parts`."""
        if self.norms_inside(x):
            return self.linear(x, weight, bias)[None]
        if self._products.suits(x, weight):
            return self._products.dot(x, weight, bias, in_parts=True)
        if self._products.suits_large(x, weight) and (parts := self._products.large_parts(weight)) > 1:
            return self._products.dot(x, weight, bias, shape=LARGE._replace(parts=parts))
        if self._cluster is not None and self._cluster.suits(x, weight, bias, "parts"):
            return self._cluster.dot(x, weight, "parts")
        return self.linear(x, weight, bias)[None]

    def extended_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int
    ) -> torch.Tensor | None:
        """See `kernels.FusedKernels.extended_parts`."""
        if not self._products.suits_extended(x, weight, out_features):
            return None
        return self._products.dot(x, weight, bias, shape=EXTENDED)

    def project(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `kernels.FusedKernels.project`."""
        if self.norms_inside(x):
            return self._products.linear(x, weight, None, dtype=torch.float32)
        if self._products.suits_large(x, weight):
            return self._products.dot(x, weight, None, shape=LARGE, dtype=torch.float32)[0]
        if self._cluster is not None and self._cluster.suits(x, weight, None, "floats"):
            return self._cluster.dot(x, weight, "floats")[0]
        if not x.is_cuda or x.dtype == torch.float32:  # torch does not have this product there
            return functional.linear(x, weight).float()
        out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
        return out.view(*x.shape[:-1], -1)

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        norm: NormWeight | None = None,
    ) -> torch.Tensor:
        """See `kernels.FusedKernels.gated_linear`."""
        if self.norms_inside(x):
            return self._products.linear(x, weight, bias, norm, activation=activation)
        x = self._normed(x, norm)
        if self._products.suits(x, weight, gated=True):
            return self._products.dot(x, weight, bias, activation)[0]
        if self._cluster is not None and self._cluster.suits(x, weight, bias, "gated", activation):
            return self._cluster.dot(x, weight, "gated", activation)[0]
        if self._products.suits_many(x, weight, bias):
            return self._products.gated(x, weight, activation)
        return self.act_and_mul(functional.linear(x, weight, bias), activation)

    def add_linear(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `kernels.FusedKernels.add_linear`."""
        if self.norms_inside(x):
            return self._products.linear(x, weight, bias, residual=residual)
        n, k = weight.shape
        residual.view(-1, n).addmm_(x.reshape(-1, k), weight.t())
        return residual if bias is None else residual.add_(bias)

    def joins_rows(self, rows: int) -> bool:
        """See `kernels.FusedKernels.joins_rows`."""
        return self._between is not None and FEWEST_ROWS <= rows <= MOST_ROWS

    def joins(self, weights: LayerWeights) -> bool:
        """See `kernels.FusedKernels.joins`."""
        return self._between is not None and self._between.suits(weights)

    def between(
        self, attended: torch.Tensor, residual: torch.Tensor, weights: LayerWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.FusedKernels.between`."""
        assert self._between is not None, "asked for where it does not join"
        return self._between(attended, residual, weights)

    def norms_inside(self, x: torch.Tensor) -> bool:
        """See `kernels.FusedKernels.norms_inside`."""
        return x.numel() <= PRODUCT_ROWS * x.shape[-1]

    def _normed(self, x: torch.Tensor, norm: NormWeight | None) -> torch.Tensor:
        return x if norm is None else self.rms_norm(x, norm.weight, norm.eps, norm.offset)


def triton_kernels_for(device: str) -> TritonKernels:
    """Return the kernels for a GPU, e.g. ``cuda:0``."""
    capability = torch.cuda.get_device_capability(device)
    count = torch.cuda.get_device_properties(device).multi_processor_count if capability[0] == HOPPER else 0
    early = capability >= EARLIEST
    between = BetweenAttentions(early=early, device=torch.device(device), multiprocessors=count) if count else None
    return TritonKernels(early=early, multiprocessors=count, between=between)


def _row_options(n: int) -> dict[str, int]:
    padded, warps = _row_sizes(n)
    return {"padded": padded, "num_warps": warps}


def _row_sizes(n: int) -> tuple[int, int]:
    """Return the padded elements of a row, and the warps of its program."""
    padded = next_power_of_2(n)
    return padded, min(16, max(1, padded // 256))
