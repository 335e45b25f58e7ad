"""Launches of our products, of few rows and of many, and their sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from slotline.kernels.triton_launcher import Boxes, Launcher, cdiv, next_power_of_2
from slotline.plugins.model_families.passes import gated_kernels, product_kernels
from slotline.plugins.model_families.passes.kernels import NormWeight

PRODUCT_ROWS = 1
"""Up to so many rows our product fetches a weight faster than torch's library, which is made for more."""
MANY_PROGRAMS = 16384
"""From so many programs on, starting early costs more than it gains: the next kernel's take the place of ours."""


LARGE_WEIGHT = 1 << 23
"""Elements of a weight from which on torch's library fetches it as fast as we do, unless we also activate, or a norm
behind sums our parts."""
DOT_ROWS, LARGE_DOT_ROWS = 128, 32
"""Up to so many rows our product on the matrix units is faster than torch's library; and under a large weight with an
activation, or in parts."""
RESIDENT, FEWEST_ELEMENTS = 2, 1024
"""Programs of `LARGE` that a multiprocessor holds, and the fewest elements of a part."""


FEW_ROWS = 16
"""Up to so many rows a product takes the smallest tile of rows, and in parts a smaller one of outputs, too."""


class DotShape(NamedTuple):
    """Sizes of the product on the matrix units.

    Attributes:
        outputs, elements: of a program's tile of the weight.
        warps, stages: of a program, and of its pipeline.
        parts: into how many the elements of a row are cut.
        fetched: elements of each row to ask for before the kernel in front has ended.
    """

    outputs: int
    elements: int
    warps: int
    stages: int
    parts: int = 1
    fetched: int = 0


LARGE = DotShape(64, 128, 4, 4, fetched=512)
"""The fastest of some twenty under each large weight of a model with hidden states of 4,096."""
SINGLE = DotShape(64, 128, 4, 6, fetched=512)
"""The fastest of twelve for one program on a multiprocessor: 96 programs of 4,096 elements, with the norm in front 17.4
us for 5 rows and 17.6 for 20 where torch's library takes 18.6 and 18.8, and `LARGE` 19.2 and 20.4."""
EXTENDED = DotShape(64, 64, 4, 6, 3)
"""The fastest of 23 for 64 rows, 4,352 outputs, and 4,096 or 14,336 elements."""
EXTENDED_ROWS = (33, 64)


GATED_ROWS, TILES = 1024, 2.5
"""Rows, and tiles for each multiprocessor, from which on a gated product that is activated where it is made takes less
time than torch's library and the activation behind it."""


class GatedShape(NamedTuple):
    """Sizes of the gated product of many rows.

    Attributes:
        rows, outputs, elements: of a tile.
        group: rows of tiles that are taken together.
        warps, stages: of a program, and of its pipeline.
    """

    rows: int
    outputs: int
    elements: int
    group: int
    warps: int
    stages: int


GATED = GatedShape(128, 128, 64, 8, 8, 3)


class Products:
    """Matrix products by our kernels.

    Args:
        early: the launch's options, including `early`.
        multiprocessors: multiprocessors of a device with the copy engine and matrix units that the gated product of
            many rows needs (Hopper). 0 for other devices.
    """

    def __init__(self, early: dict[str, bool], multiprocessors: int = 0) -> None:
        self._early = early
        self._multiprocessors = multiprocessors
        self._gated_linear = Launcher(gated_kernels.gated_linear)
        self._input_boxes = Boxes((GATED.rows, GATED.elements))
        self._weight_boxes = Boxes((2, GATED.outputs, GATED.elements))
        self._output_boxes = Boxes((GATED.rows, GATED.outputs))

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: NormWeight | None = None,
        residual: torch.Tensor | None = None,
        activation: str = "none",
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return ``residual + norm(x) @ weight.T + bias`` or ``activation(gate) * up`` of it as a new tensor.

        x is [..., in_features], weight [out_features, in_features] contiguous, the output [..., outputs], the residual
        like the output. `dtype` is the output's, by default x's.
        """
        x, (n, k) = x.contiguous(), weight.shape
        rows, gated = x.numel() // k, activation != "none"
        n = n // 2 if gated else n
        out = x.new_empty((*x.shape[:-1], n), dtype=dtype)
        programs = rows * (n if gated else cdiv(n, 2))
        block_k, warps = _sizes(k)
        options: dict[str, Any] = self._early if programs < MANY_PROGRAMS else {"early": False}
        product_kernels.linear[(programs,)](
            x,
            weight,
            x if bias is None else bias,
            x if norm is None else norm.weight,
            x if residual is None else residual,
            out,
            rows,
            n,
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            k=k,
            block_k=block_k,
            has_bias=bias is not None,
            has_norm=norm is not None,
            has_residual=residual is not None,
            activation=activation,
            num_warps=warps,
            **options,
        )
        return out

    def suits(self, x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False) -> bool:
        """Return True if `dot` is the fastest product for the number of rows of x [..., in_features].

        False in float32, which the matrix units would round.
        """
        if x.dtype == torch.float32:
            return False
        most = DOT_ROWS if weight.numel() <= LARGE_WEIGHT else LARGE_DOT_ROWS if gated else 0
        return x.numel() <= most * x.shape[-1]

    def suits_large(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return True if `dot` with `LARGE` lets all programs run at once and is faster for a large weight.

        Only on Hopper, because no other card was measured.
        """
        few = x.dtype != torch.float32 and x.numel() <= LARGE_DOT_ROWS * x.shape[-1]
        return few and self._multiprocessors > 0 and weight.numel() > LARGE_WEIGHT

    def suits_single(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return True if `dot` with `SINGLE` is faster for a large weight: if each program has a multiprocessor."""
        return self.suits_large(x, weight) and cdiv(len(weight), SINGLE.outputs) <= self._multiprocessors

    def large_parts(self, weight: torch.Tensor) -> int:
        """Return the number of parts of a large weight's elements [n, k] so that all programs run at once."""
        n, k = weight.shape
        parts = RESIDENT * self._multiprocessors // cdiv(n, LARGE.outputs)
        return max(1, min(parts, k // FEWEST_ELEMENTS))

    def suits_extended(self, x: torch.Tensor, weight: torch.Tensor, out_features: int) -> bool:
        """Return True if `dot` with `EXTENDED` is faster than torch's library.

        The weight had `out_features` rows before it was extended. The library gives a program 64 outputs of half of the
        rows, and a multiprocessor one program. It takes a third longer as soon as there are more programs than
        multiprocessors. Three of our programs fit into one.
        """
        rows, (fewest, most) = x.numel() // x.shape[-1], EXTENDED_ROWS
        if x.dtype == torch.float32 or not x.is_cuda or not fewest <= rows <= most:
            return False
        held: int = torch.cuda.get_device_properties(x.device).multi_processor_count
        before, after = (2 * (-(-size // 64)) for size in (out_features, len(weight)))
        return before <= held < after

    def dot(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str = "none",
        *,
        in_parts: bool = False,
        shape: DotShape | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` or ``activation(gate) * up`` of it on the matrix units, [parts, ..., outputs].

        Several parts are float32. There is one part, of `dtype` or x's, unless parts are allowed or required by a
        shape.
        """
        x, (n, k) = x.contiguous(), weight.shape
        rows, gated = x.numel() // k, activation != "none"
        n = n // 2 if gated else n
        shape = shape or _dot_shape(n, rows, in_parts=in_parts)
        # One size fewer to compile where it gains nothing.
        large = gated or weight.numel() > LARGE_WEIGHT
        block_m = 16 if rows <= FEW_ROWS else 32 if large and rows <= 32 else 64
        out = x.new_empty((shape.parts, *x.shape[:-1], n), dtype=torch.float32 if shape.parts > 1 else dtype)
        product_kernels.dot_linear[(cdiv(n, shape.outputs), cdiv(rows, block_m), shape.parts)](
            x,
            weight,
            x if bias is None else bias,
            out,
            rows,
            n,
            k=k,
            block_m=block_m,
            block_n=shape.outputs,
            block_k=shape.elements,
            stages=shape.stages,
            parts=shape.parts,
            has_bias=bias is not None,
            activation=activation,
            fetched=shape.fetched,
            num_warps=shape.warps,
            **self._early,
        )
        return out

    def suits_many(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Return True if `gated` is the fastest product for the number of rows of x [..., in_features].

        Its copies need rows that begin at multiples of 16 bytes.
        """
        if not self._multiprocessors or bias is not None or x.dtype == torch.float32 or x.dtype != weight.dtype:
            return False
        (n, k), rows = weight.shape, x.numel() // x.shape[-1]
        tiles = cdiv(rows, GATED.rows) * cdiv(n, 2 * GATED.outputs)
        many = rows >= GATED_ROWS and tiles >= TILES * self._multiprocessors
        return many and k % 8 == 0 and n % 16 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0

    def gated(self, x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
        """Return ``activation(gate) * up`` of ``x @ weight.T`` for many rows, [..., outputs], rounded only once."""
        x, k, n = x.contiguous(), weight.shape[1], weight.shape[0] // 2
        rows, shape = x.numel() // k, GATED
        out = x.new_empty((*x.shape[:-1], n))
        tiles = cdiv(rows, shape.rows) * cdiv(n, shape.outputs)
        self._gated_linear(
            (min(self._multiprocessors, tiles),),
            self._input_boxes(x, (rows, k), (k, 1)),
            self._weight_boxes(weight, (2, n, k), (n * k, k, 1)),
            self._output_boxes(out, (rows, n), (n, 1)),
            rows,
            n,
            k,
            shape.rows,
            shape.outputs,
            shape.elements,
            shape.group,
            self._multiprocessors,
            activation,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        return out


def _dot_shape(n: int, rows: int, *, in_parts: bool) -> DotShape:
    """Return the sizes of a product of n outputs. `in_parts` allows several parts."""
    if in_parts and rows <= FEW_ROWS:
        return DotShape(32, 128, 2, 4, 4 if n <= 2048 else 1)
    return DotShape(64, 128, 4, 4, 4 if in_parts and n <= 2048 else 1)


def _sizes(k: int) -> tuple[int, int]:
    """Return the elements that a program reads at a time and its warps, for rows of k.

    These are the fastest of eleven sizes on an H200.
    """
    if k <= 1024:
        return next_power_of_2(k), 1
    if k <= 4096:
        return 1 << (k.bit_length() - 1), 4
    return 1024, 2
