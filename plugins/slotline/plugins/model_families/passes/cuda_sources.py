"""Pieces of the kernels in CUDA C++, which are compiled behind one another."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import torch

ARCHITECTURE = "sm_90a"
SHARED_BYTES = 232448
"""Of a block at most."""
ACTIVATIONS = {
    "none": "x",
    "silu": "__fdividef(x, 1.0f + __expf(-x))",
    "gelu_tanh": "__fdividef(x, 1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)))",
    "gelu": "0.5f * x * (1.0f + erff(x * 0.7071067811865476f))",
    "relu": "x < 0.0f ? 0.0f : x",  # a NaN stays one
}


def instructions(dtype: torch.dtype) -> str:
    """Return the names of types, the rounding of two numbers to bfloat16 or float16, and `hopper_instructions.cu`."""
    return f"""typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short Half;
__device__ __forceinline__ u32 packed(float low, float high) {{
  u32 both;
  asm("cvt.rn.{half(dtype)}x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}}
{text("hopper_instructions.cu")}"""


def half(dtype: torch.dtype) -> str:
    """Return what instructions call bfloat16 or float16."""
    return "bf16" if dtype == torch.bfloat16 else "f16"


def compiled_in(constants: Mapping[str, int], activation: str) -> str:
    """Return the constants that are compiled in, and `activated`, one of `ACTIVATIONS`."""
    return f"""
{"".join(f"constexpr int {name} = {int(value)};" for name, value in constants.items())}
__device__ __forceinline__ float activated(float x) {{ return {ACTIVATIONS[activation]}; }}
"""


@cache
def text(name: str) -> str:
    """Return the text of a file of this package."""
    return files(__package__).joinpath(name).read_text()
