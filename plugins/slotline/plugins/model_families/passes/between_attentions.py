"""All that a small dense decoder computes between two attentions, in one launch on Hopper (`between_attentions.cu`).

A step of few requests of a small model is a chain of short kernels, each of which waits for the one in front, fetches
its weight, and ends before the memory was ever busy. Here one block on each multiprocessor stays for all four products
and fetches its weights without a pause while the blocks exchange rows.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch

from slotline.kernels.nvrtc import CudaKernel, compiled, has_cuda_sources
from slotline.kernels.triton_launcher import cdiv, next_power_of_2
from slotline.plugins.model_families.passes.cuda_sources import (
    ARCHITECTURE,
    SHARED_BYTES,
    compiled_in,
    half,
    instructions,
    text,
)
from slotline.plugins.model_families.passes.kernels import LayerWeights

FEWEST_ROWS, MOST_ROWS = 2, 8
"""Rows that it has been measured to be faster for, of the 32 that it can have."""
MOST_BYTES = 64 << 20
"""Of a layer's weights. Kernels for larger ones keep the memory busy by themselves."""
MOST_HIDDEN = 1024
"""Elements of a row that a block's registers have room for."""
WARPS, STEP, EIGHT, SEGMENT = 8, 32, 8, 1024
"""Warps that multiply; elements that one multiplies at a time; outputs of a tile; most elements of a stage's rows."""
THREADS = 384
"""Of a block: two warp groups that multiply and one that copies."""
MOST_TILES = 3
"""Tiles of gate and up that a block multiplies at once."""
WINDOW = 2
"""Stages whose copies are under way at once."""
FILLED = 0.8
"""The share of the blocks' time that must be filled."""
COUNTERS, COUNTER = 4096, 16
"""Places for the counters by which blocks meet, and numbers from one to the next."""


class Sizes(NamedTuple):
    """Sizes of a layer's weights: o [hidden, attended], gate and up [2 * inner, hidden], down, and qkv [qkv, hidden].

    Attributes:
        hidden, attended, inner: elements of a row of hidden states, of attention's output, and of the MLP.
        qkv: outputs of the next layer's merged projection.
    """

    hidden: int
    attended: int
    inner: int
    qkv: int

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """Tiles, elements of a row, and weights of each product."""
        return (
            (self.hidden // EIGHT, self.attended, 1),
            (self.inner // EIGHT, self.hidden, 2),
            (self.hidden // EIGHT, self.inner, 1),
            (self.qkv // EIGHT, self.hidden, 1),
        )

    @property
    def stage_bytes(self) -> int:
        """Of eight segments of rows, where each begins half of the banks after the one above."""
        return max(EIGHT * _stride(elements) for _, elements, _ in self.products)

    def stages(self, blocks: int) -> int:
        """Return the most stages that one of so many blocks needs."""
        return sum(cdiv(tiles, blocks) * weights * cdiv(k, SEGMENT) for tiles, k, weights in self.products)

    def filled(self, blocks: int) -> float:
        """Return the share of all blocks' time that has work, where the busiest block is the measure."""
        all_work = sum(tiles * k * weights for tiles, k, weights in self.products)
        return all_work / (blocks * sum(cdiv(tiles, blocks) * k * weights for tiles, k, weights in self.products))


def _stride(elements: int) -> int:
    segment = cdiv(elements, cdiv(elements, SEGMENT) * STEP) * STEP
    return 2 * segment + (64 if 2 * segment % 128 == 0 else 0)


class Form(NamedTuple):
    """What is compiled in.

    Attributes:
        sizes: of the weights.
        eights: of rows, a power of two.
        gated_tiles, qkv_tiles: of outputs that a block multiplies at once, of gate and up and of qkv.
        stages: of the ring.
        has_bias: whether the merged projection has one.
        has_offset: whether norms multiply by one plus their weight.
        window: stages whose copies are under way at once.
    """

    sizes: Sizes
    eights: int
    gated_tiles: int
    qkv_tiles: int
    stages: int
    has_bias: bool
    has_offset: bool
    window: int

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        sums = max(2 * self.gated_tiles, self.qkv_tiles) * WARPS * 8 * self.eights * EIGHT * 4
        squares, barriers = WARPS * 8 * self.eights * 4, 16 * self.stages
        return self.stages * self.sizes.stage_bytes + sums + squares + barriers


def form_of(sizes: Sizes, rows: int, blocks: int, *, has_bias: bool, has_offset: bool) -> Form:
    """Return the form for some rows: with as many stages as there is room for, or as a block needs."""
    form = Form(
        sizes,
        next_power_of_2(cdiv(rows, 8)),
        min(MOST_TILES, cdiv(sizes.inner // EIGHT, blocks)),
        min(2 * MOST_TILES, cdiv(sizes.qkv // EIGHT, blocks)),
        sizes.stages(blocks),
        has_bias,
        has_offset,
        WINDOW,
    )
    while form.shared_bytes > SHARED_BYTES:
        form = form._replace(stages=form.stages - 1)
    return form


def sizes_of(weights: LayerWeights) -> Sizes:
    """Return the sizes of a layer's weights."""
    return Sizes(len(weights.o), weights.o.shape[1], weights.down.shape[1], len(weights.qkv))


class BetweenAttentions:
    """Launches the kernel.

    Args:
        early: whether it may start early (programmatic dependent launch).
        device: of the weights.
        multiprocessors: of the device.
        cooperative: whether the driver is asked to run all blocks at once.
    """

    def __init__(self, *, early: bool, device: torch.device, multiprocessors: int, cooperative: bool = True) -> None:
        self._early, self._cooperative, self._blocks = early, cooperative, multiprocessors
        self._kernels: dict[tuple[Form, torch.dtype, str], CudaKernel] = {}
        self._images: dict[tuple[Form, torch.dtype, str], Future[bytes]] = {}
        self._seen: set[tuple[Sizes, torch.dtype, str, bool, float]] = set()
        self._counters = torch.zeros(COUNTERS * COUNTER, dtype=torch.int64, device=device)
        self._places: dict[tuple[int, int], torch.Tensor] = {}

    def suits(self, weights: LayerWeights) -> bool:
        """Return True if it takes a layer's weights.

        The first question has the kernel compiled, so that no request waits for it.
        """
        if not fits(weights, self._blocks) or not has_cuda_sources():
            return False
        kind = sizes_of(weights), weights.o.dtype, weights.activation, weights.bias is not None, weights.norm.offset
        if kind not in self._seen:
            self._seen.add(kind)
            self._image(self._key(weights, MOST_ROWS))
        return True

    def __call__(
        self, attended: torch.Tensor, residual: torch.Tensor, weights: LayerWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output [..., hidden] and the next layer's merged projection [..., outputs].

        Only where it suits.

        Args:
            attended: output of attention [..., heads * size].
            residual: the layer's input [..., hidden].
            weights: between the two attentions.

        Raises:
            PluginLoadError: if the kernel cannot be compiled or launched.
        """
        attended, residual, sizes = attended.contiguous(), residual.contiguous(), sizes_of(weights)
        rows = residual.numel() // sizes.hidden
        kernel = self._kernel(weights, rows)
        middle, out = torch.empty_like(residual), torch.empty_like(residual)
        gated = residual.new_empty((*residual.shape[:-1], sizes.inner))
        qkv = residual.new_empty((*residual.shape[:-1], sizes.qkv))
        kernel(
            self._blocks,
            attended,
            residual,
            weights.o,
            weights.norm.weight,
            weights.gate_up,
            weights.down,
            weights.next_norm.weight,
            weights.qkv,
            weights.o if weights.bias is None else weights.bias,
            middle,
            gated,
            out,
            qkv,
            self._counter(),
            rows,
            float(weights.norm.eps),
            float(weights.next_norm.eps),
        )
        return out, qkv

    def _key(self, weights: LayerWeights, rows: int) -> tuple[Form, torch.dtype, str]:
        has_bias, has_offset = weights.bias is not None, weights.norm.offset != 0
        form = form_of(sizes_of(weights), rows, self._blocks, has_bias=has_bias, has_offset=has_offset)
        return form, weights.o.dtype, weights.activation

    def _image(self, key: tuple[Form, torch.dtype, str]) -> Future[bytes]:
        if key not in self._images:
            self._images[key] = _threads().submit(compiled, source(*key), ARCHITECTURE)
        return self._images[key]

    def _kernel(self, weights: LayerWeights, rows: int) -> CudaKernel:
        key = self._key(weights, rows)
        if key not in self._kernels:
            self._kernels[key] = CudaKernel(
                self._image(key).result(),
                "between",
                threads=THREADS,
                shared_bytes=key[0].shared_bytes,
                early=self._early,
                cooperative=self._cooperative,
            )
        return self._kernels[key]

    def _counter(self) -> torch.Tensor:
        """Return the counter of the current stream, or of the graph that it is being captured into."""
        stream, capture = torch.cuda.current_stream().cuda_stream, 0
        if torch.cuda.is_current_stream_capturing():
            from cuda.bindings import driver

            error, _, found, *_ = driver.cuStreamGetCaptureInfo(stream)
            capture = int(found) if error == 0 else -1 - len(self._places)  # then each launch has its own
        key = (stream, capture)
        if key not in self._places:
            place = len(self._places) % COUNTERS * COUNTER
            self._places[key] = self._counters[place : place + 1]
        return self._places[key]


def fits(weights: LayerWeights, blocks: int) -> bool:
    """Return True if the kernel takes a layer's weights, and so many blocks have much the same work."""
    tensors = (weights.o, weights.gate_up, weights.down, weights.qkv, weights.norm.weight, weights.next_norm.weight)
    dtype, sizes = weights.o.dtype, sizes_of(weights)
    if dtype not in (torch.bfloat16, torch.float16) or any(tensor.dtype != dtype for tensor in tensors):
        return False
    if any(tensor.data_ptr() % 16 or not tensor.is_contiguous() for tensor in tensors):
        return False
    if sum(tensor.numel() for tensor in tensors) * 2 > MOST_BYTES or sizes.hidden > MOST_HIDDEN:
        return False
    if any(size % STEP for size in (sizes.hidden, sizes.attended, sizes.inner)) or sizes.qkv % EIGHT:
        return False
    offsets = weights.norm.offset, weights.next_norm.offset
    return offsets in ((0.0, 0.0), (1.0, 1.0)) and sizes.filled(blocks) >= FILLED


def source(form: Form, dtype: torch.dtype, activation: str) -> str:
    """Return the kernel's source for a form, bfloat16 or float16, and one of `ACTIVATIONS`."""
    return f"{instructions(dtype)}{_halves(dtype)}{body(form, activation)}"


def body(form: Form, activation: str) -> str:
    """Return the part of the source that has no instruction of its own."""
    constants = {
        "HIDDEN": form.sizes.hidden,
        "ATTENDED": form.sizes.attended,
        "INNER": form.sizes.inner,
        "QKV": form.sizes.qkv,
        "EIGHTS": form.eights,
        "GATED_TILES": form.gated_tiles,
        "QKV_TILES": form.qkv_tiles,
        "STAGES": form.stages,
        "WINDOW": form.window,
        "SEGMENT": SEGMENT,
        "HAS_BIAS": form.has_bias,
        "HAS_OFFSET": form.has_offset,
    }
    return f"{compiled_in(constants, activation)}{text('between_attentions.cu')}"


def _halves(dtype: torch.dtype) -> str:
    """Return the instructions of its own that the kernel has for bfloat16 and for float16."""
    if dtype == torch.bfloat16:
        widened = "return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));"
    else:
        widened = """float2 wide;
  asm("{\\n.reg .b16 low, high;\\nmov.b32 {low, high}, %2;\\ncvt.f32.f16 %0, low;\\ncvt.f32.f16 %1, high;\\n}"
      : "=f"(wide.x), "=f"(wide.y) : "r"(both));
  return wide;"""
    return f"""
__device__ __forceinline__ float2 unpacked(u32 both) {{
  {widened}
}}
__device__ __forceinline__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {{
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.{half(dtype)}.{half(dtype)}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}},"
      " {{%8, %9}}, {{%0, %1, %2, %3}};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}}
"""


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the thread that compiles."""
    return ThreadPoolExecutor(1, "between-attentions")
