"""Functions of Gluon that have other names in Triton 3.6 than in 3.9."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
load_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
