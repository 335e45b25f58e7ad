"""Products of some tens to some hundreds of rows under large weights, on Hopper in CUDA C++ (`cluster_products.cu`).

Between few rows, which our products in Triton's own language serve (`product_kernels`), and many, torch's library takes
a third more time than fetching the weight does: it begins when the kernel in front has ended, its tiles leave a part of
the multiprocessors without work in their last round, and gate and up are activated by a kernel of their own. Here the
loading warp asks for its first tiles of the weight while the kernel in front still runs, tiles are as wide as gives
each multiprocessor the same, and two multiprocessors share what both need of x or of the weight.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Literal, NamedTuple

import torch

from slotline.kernels.nvrtc import CudaBoxes, CudaKernel, compiled, has_cuda_sources
from slotline.kernels.triton_launcher import cdiv
from slotline.plugins.model_families.passes.cuda_sources import (
    ARCHITECTURE,
    SHARED_BYTES,
    compiled_in,
    half,
    instructions,
    text,
)

FEWEST_ROWS, MOST_ROWS = 33, 256
"""Rows that it has been measured to be faster for, with a weight of at least `LARGE_WEIGHT` elements."""
LARGE_WEIGHT = 1 << 25
CLASSES = (64, 128, 192, 256)
"""Up to so many rows a kernel serves."""
BY_WEIGHTS = 192
"""Up to so many rows two multiprocessors share x, and each has all rows in its registers; above, they share a weight,
which is no faster than torch's library for a whole float32 result."""
ELEMENTS, GROUP_ROWS = 64, 64
"""Elements of a row in a tile, and rows that a warp group multiplies."""
COLUMNS = (128, 160, 192, 224, 256)
"""Rows of the weight in a tile; fewer would wait for shared memory, which each warp group reads by itself."""
WIDEST = {1: 256, 2: 256, 3: 192}
"""By warp groups, the most columns of one instruction, whose sums must be among the registers of a launch."""
REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160)}
"""By warp groups, of a thread that loads and of one that multiplies."""
ALIGNMENT, BARRIERS = 1024, 16
"""Bytes: of the first tile's place; and of each stage's two barriers."""
FEWEST_ELEMENTS, MOST_PARTS = 1024, 8
"""Of a part, and of a row's elements."""
FILLED = 0.8
"""The share of all rounds of multiprocessors that must have work."""
END = 8
"""Tiles of elements that take as long as what follows the last: activation, stores, and who reads several parts."""

Kind = Literal["gated", "parts", "floats"]
"""Gate and up with their activation; float32 parts, or one of x's dtype; or float32 whole."""


class Form(NamedTuple):
    """Sizes of a product, which are compiled in.

    Attributes:
        groups: warp groups that multiply, each `GROUP_ROWS` rows.
        columns: rows of the weight in a tile, gate and up together.
        by_rows: whether two multiprocessors have each their rows and share the tiles of the weight.
        gated: whether the weight is gate and up.
        floats: whether the result is float32.
    """

    groups: int
    columns: int
    by_rows: bool
    gated: bool
    floats: bool

    @property
    def rows(self) -> int:
        """Of x in a tile."""
        return GROUP_ROWS * self.groups

    @property
    def stage_bytes(self) -> int:
        """Of a tile of x, one of the weight, and their barriers."""
        return (self.rows + self.columns) * ELEMENTS * 2 + BARRIERS

    @property
    def stages(self) -> int:
        """Tiles that shared memory has room for."""
        return (SHARED_BYTES - ALIGNMENT) // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return ALIGNMENT + self.stages * self.stage_bytes


class Cut(NamedTuple):
    """Division of a weight for some rows.

    Attributes:
        form: form of the product.
        parts: number of parts of the elements of a row.
        items: pairs of tiles, or tiles by rows, and their parts, for two multiprocessors each.
    """

    form: Form
    parts: int
    items: int


class ClusterProducts:
    """Launches the kernel.

    Args:
        early: whether it may start early (programmatic dependent launch).
        multiprocessors: of the device.
    """

    def __init__(self, *, early: bool, multiprocessors: int) -> None:
        self._early, self._clusters = early, multiprocessors // 2
        self._kernels: dict[tuple[torch.device, Form, torch.dtype, str], CudaKernel] = {}
        self._images: dict[tuple[Form, torch.dtype, str], Future[bytes]] = {}
        self._boxes: dict[tuple[int, ...], CudaBoxes] = {}
        self._cuts: dict[tuple[int, int, int, Kind], Cut | None] = {}
        self._seen: set[tuple[int, int, Kind, torch.dtype, str]] = set()

    def suits(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: Kind, activation: str = "none"
    ) -> bool:
        """Return True if this is the fastest product for x [..., k] and weight [outputs, k].

        The first call for a weight's shape, with any number of rows, compiles all its kernels, so that no request waits
        for one.
        """
        (n, k), rows = weight.shape, x.numel() // x.shape[-1]
        if weight.numel() < LARGE_WEIGHT or bias is not None:
            return False
        if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != weight.dtype or not has_cuda_sources():
            return False
        n = n // 2 if kind == "gated" else n
        if (n, k, kind, x.dtype, activation) not in self._seen:
            self._seen.add((n, k, kind, x.dtype, activation))
            self._compile(n, k, kind, x.dtype, activation)
        return x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and self.cut(rows, n, k, kind) is not None

    def _compile(self, n: int, k: int, kind: Kind, dtype: torch.dtype, activation: str) -> None:
        """Have the kernels for a weight compiled side by side."""
        for rows in CLASSES:
            cut = self.cut(rows, n, k, kind)
            if cut is not None and (cut.form, dtype, activation) not in self._images:
                text = source(cut.form, dtype, activation)
                self._images[cut.form, dtype, activation] = _threads().submit(compiled, text, ARCHITECTURE)

    def cut(self, rows: int, n: int, k: int, kind: Kind) -> Cut | None:
        """Return the fastest division for n outputs of k elements.

        Of equal ones it is the one with the fewest parts, then with the widest tiles. None if torch's library is faster
        or too few multiprocessors would have work. A product in parts is faster only after a gated product of k
        outputs, which it lets start early.
        """
        key = (rows, n, k, kind)
        if key not in self._cuts:
            self._cuts[key] = self._cut(*key)
        return self._cuts[key]

    def _cut(self, rows: int, n: int, k: int, kind: Kind) -> Cut | None:
        most = BY_WEIGHTS if kind == "floats" else MOST_ROWS
        if not FEWEST_ROWS <= rows <= most or (kind == "parts" and self.cut(rows, k, n, "gated") is None):
            return None
        by_rows, gated = rows > BY_WEIGHTS, kind == "gated"
        groups = cdiv(rows, 2 * GROUP_ROWS if by_rows else GROUP_ROWS)
        found = []
        for columns in COLUMNS:
            outputs = columns // 2 if gated else columns
            tiles = cdiv(n, outputs if by_rows else 2 * outputs)
            for parts in range(1, 1 + (min(MOST_PARTS, k // FEWEST_ELEMENTS) if kind == "parts" else 1)):
                rounds = cdiv(tiles * parts, self._clusters)
                if k % (parts * ELEMENTS) == 0 and tiles * parts >= FILLED * rounds * self._clusters:
                    form = Form(groups, columns, by_rows, gated, floats=parts > 1 or kind == "floats")
                    cost = rounds * columns * (k // ELEMENTS // parts + END)
                    found.append((cost, parts, -columns, Cut(form, parts, tiles * parts)))
        return min(found)[-1] if found and n % 8 == 0 else None

    def dot(self, x: torch.Tensor, weight: torch.Tensor, kind: Kind, activation: str = "none") -> torch.Tensor:
        """Return ``x @ weight.T``, or ``activation(gate) * up`` of it, [parts, ..., outputs], like `Products.dot`.

        Only where it suits.

        Raises:
            PluginLoadError: if the kernel cannot be compiled or launched.
        """
        x, (n, k), gated = x.contiguous(), weight.shape, kind == "gated"
        rows, n = x.numel() // k, n // 2 if gated else n
        cut = self.cut(rows, n, k, kind)
        assert cut is not None, "asked for where it does not suit"
        form = cut.form
        out = x.new_empty((cut.parts, *x.shape[:-1], n), dtype=torch.float32 if form.floats else None)
        columns = form.columns // 2 if form.by_rows else form.columns
        if gated:
            boxes = self._boxes_of(columns // 16, 2, 8, ELEMENTS)(weight, (n // 8, 2, 8, k), (8 * k, n * k, k, 1))
        else:
            boxes = self._boxes_of(columns, ELEMENTS)(weight, (n, k), (k, 1))
        self._kernel(x.device, form, x.dtype, activation)(
            2 * min(self._clusters, cut.items),
            self._boxes_of(form.rows if form.by_rows else form.rows // 2, ELEMENTS)(x, (rows, k), (k, 1)),
            boxes,
            out,
            rows,
            n,
            k // ELEMENTS // cut.parts,
            cut.parts,
            cut.items,
        )
        return out

    def _boxes_of(self, *box: int) -> CudaBoxes:
        if box not in self._boxes:
            self._boxes[box] = CudaBoxes(box)
        return self._boxes[box]

    def _kernel(self, device: torch.device, form: Form, dtype: torch.dtype, activation: str) -> CudaKernel:
        key = (device, form, dtype, activation)
        if key not in self._kernels:
            self._kernels[key] = CudaKernel(
                self._images[form, dtype, activation].result(),
                "product",
                threads=128 * (form.groups + 1),
                shared_bytes=form.shared_bytes,
                early=self._early,
            )
        return self._kernels[key]


def source(form: Form, dtype: torch.dtype, activation: str) -> str:
    """Return the kernel's source for a form, bfloat16 or float16, and one of `ACTIVATIONS`."""
    pieces = 1 if form.columns <= WIDEST[form.groups] else 2
    columns = form.columns // pieces
    loading, multiplying = REGISTERS[form.groups]
    constants = {
        "GROUPS": form.groups,
        "COLUMNS": form.columns,
        "PIECES": pieces,
        "STAGES": form.stages,
        "BY_ROWS": form.by_rows,
        "GATED": form.gated,
        "FLOATS": form.floats,
        "LOADING_REGISTERS": loading,
        "MULTIPLYING_REGISTERS": multiplying,
    }
    sums = columns // 2
    places = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    return f"""{instructions(dtype)}{compiled_in(constants, activation)}
__device__ __forceinline__ void multiply(float (&sums)[{sums}], u64 left, u64 right) {{
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half(dtype)}.{half(dtype)}"
      " {{{places}}}, %{sums}, %{sums + 1}, 1, 1, 1, 0, 0;"
      : {operands} : "l"(left), "l"(right));
}}
{text("cluster_products.cu")}"""


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the pool of threads that compile."""
    return ThreadPoolExecutor(len(CLASSES), "cluster-products")
