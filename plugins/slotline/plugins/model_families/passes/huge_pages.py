"""Asks Linux to put large allocations on huge pages.

A decode step reads every weight once; with pages of 4 KiB the address translation takes about a tenth of its time.
Packed weights are opaque, their addresses unknown, so the advice goes to every large anonymous mapping of the process.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from slotline.plugins.model_families.passes.packed_linear import PackedLinear
from slotline.plugins.model_families.passes.target import Target

MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
"""Use huge pages from now on (Linux 2.6.38); move what is there at once (Linux 6.1)."""

SMALLEST_MODEL = 64 << 20
"""Bytes of packed weights below which the advice is not worth its time."""

SMALLEST_MAPPING = 2 << 20
MAPS = Path("/proc/self/maps")


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Advise, if packed weights are large enough to gain."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    size = sum(module.in_features * module.out_features * target.dtype.itemsize for module in packed)
    if size < SMALLEST_MODEL or not sys.platform.startswith("linux") or not MAPS.exists():
        return ()
    advised = advise()
    return (f"huge pages for {advised >> 20} MiB",) if advised else ("huge pages refused by the kernel",)


def advise() -> int:
    """Advise huge pages for all large anonymous mappings; gives the bytes for which the kernel agreed."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advised = 0
    for start, end in list(_large_mappings()):
        if madvise(start, end - start, MADV_HUGEPAGE) == 0:
            advised += end - start
            madvise(start, end - start, MADV_COLLAPSE)  # an older kernel refuses; its daemon then does it later
    return advised


def _large_mappings() -> Iterator[tuple[int, int]]:
    """Start and end address of the writable private mappings without a file, the heap among them."""
    for line in MAPS.read_text().splitlines():
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        anonymous = inode == "0" and (not name or name[0] == "[heap]")
        if anonymous and permissions == "rw-p" and end - start >= SMALLEST_MAPPING:
            yield start, end
