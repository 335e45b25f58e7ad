"""Everything that our kernels in Gluon take from Triton, where names differ from release to release.

Names are looked up, versions are not: the module imports with any Triton that has them all, which are those from 3.6
on. Otherwise its import raises `ImportError` or `AttributeError` with the name that is missing; `gluon_support` makes
the reason of it that users see. `benchmarks/compile_kernels.py` compiles the kernels with any Triton, without a GPU.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon as gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy as async_copy
from triton.experimental.gluon.language.nvidia.ampere import mma_v2 as mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init as warpgroup_mma_init
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents as gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait as gdc_wait


def _either(module, new, old):
    """Return a module's attribute by its new name, or by the one of older releases."""
    return getattr(module, new) if hasattr(module, new) else getattr(module, old)


thread_barrier = _either(gl, "barrier", "thread_barrier")  # 3.6 has the old name
load_box = _either(tma, "async_load", "async_copy_global_to_shared")  # 3.6 and 3.7 have the old ones
load_rows = _either(async_copy, "async_load", "async_copy_global_to_shared")


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(memory, shape: gl.constexpr, boxes):
        """Return the same shared memory in another shape, in the layout of boxes that are loaded into it."""
        return memory.reinterpret(memory.dtype, shape, boxes.layout)

else:  # up to 3.8

    @gluon.jit
    def reinterpret(memory, shape: gl.constexpr, boxes):
        """Return the same shared memory in another shape, in the layout of boxes that are loaded into it."""
        return memory._reinterpret(memory.dtype, shape, boxes.layout)
