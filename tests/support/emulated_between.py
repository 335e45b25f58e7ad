"""The kernel between two attentions on a CPU: the same source, compiled by g++ with an emulator of its instructions."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slotline.plugins.model_families.passes import between_attentions
from slotline.plugins.model_families.passes.between_attentions import (
    THREADS,
    BetweenAttentions,
    Form,
    body,
    form_of,
    sizes_of,
)
from slotline.plugins.model_families.passes.kernels import LayerWeights

ENTRY = f"""
static u64 given[14];
static int rows;
static float eps, next_eps;
static void entry() {{
  auto at = [](int which) {{ return (Half*)given[which]; }};
  between(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11), at(12),
          (u64*)given[13], rows, eps, next_eps);
}}
extern "C" int run(u64* pointers, int some, float one, float other, int blocks, int bytes) {{
  for (int i = 0; i < 14; i++) given[i] = pointers[i];
  rows = some, eps = one, next_eps = other;
  return emulated::run(entry, blocks, {THREADS}, bytes);
}}
"""


class EmulatedBetween(BetweenAttentions):
    """`BetweenAttentions` of some blocks, whose kernels run on the CPU.

    Args:
        blocks: of a launch.
        folder: for compiled kernels.
        stages: the most stages of a ring.

    Attributes:
        launched: rows of each launch.
    """

    def __init__(self, blocks: int, folder: Path, stages: int = 1000) -> None:
        super().__init__(early=False, device=torch.device("cpu"), multiprocessors=blocks)
        self._folder, self._stages = folder, stages
        self._runs: dict[tuple[Form, str], Callable[..., None]] = {}
        self.launched: list[int] = []

    def suits(self, weights: LayerWeights) -> bool:
        return between_attentions.fits(weights, self._blocks)

    def _kernel(self, weights: LayerWeights, rows: int) -> Any:
        sizes, has_bias, has_offset = sizes_of(weights), weights.bias is not None, weights.norm.offset != 0
        form = form_of(sizes, rows, self._blocks, has_bias=has_bias, has_offset=has_offset)
        stages = min(form.stages, self._stages)
        form = form._replace(stages=stages, window=min(form.window, stages))
        key = (form, weights.activation)
        self.launched.append(rows)
        if key not in self._runs:
            self._runs[key] = emulated(form, weights.activation, self._folder / f"{len(self._runs)}.so")
        return self._runs[key]

    def _counter(self) -> torch.Tensor:
        return self._counters[:1]


def emulated(form: Form, activation: str, library: Path) -> Callable[..., None]:
    """Compile the kernel of a form. It is called like a `CudaKernel`."""
    source = library.with_suffix(".cpp")
    source.write_text(f'#include "hopper_emulator.h"\n{body(form, activation)}{ENTRY}')
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-I", str(Path(__file__).parent)]
    subprocess.run(["g++", *options, str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).run

    def run(blocks: int, *arguments: Any) -> None:
        pointers = (ctypes.c_uint64 * 14)(*(tensor.data_ptr() for tensor in arguments[:14]))
        rows, *floats = arguments[14:]
        assert function(pointers, rows, *map(ctypes.c_float, floats), blocks, form.shared_bytes), "no thread can go on"

    return run
