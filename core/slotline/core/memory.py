"""Sizing the pool: how many blocks the memory holds beside weights and activations."""

from __future__ import annotations

import contextlib
import mmap
import resource
from collections.abc import Callable

import psutil
import torch
from attrs import frozen

from slotline.registry.config import size_in_bytes
from slotline.registry.errors import CapacityError

_CPU_DEFAULT_LIMIT = 4 * 2**30  # a laptop's memory is not the engine's alone, unless its owner says so


@frozen(kw_only=True)
class MemoryReport:
    """Where the memory goes, in bytes.

    Attributes:
        total: of the device.
        activations: peak of a profiling step beyond the weights.
        cache: for the pool.
        block: one block over all layers.
        num_blocks: blocks in the pool, the null block included.
    """

    total: int
    activations: int
    cache: int
    block: int
    num_blocks: int


def size_pool(
    asked: float | str,
    *,
    explicit: bool,
    device: str,
    total: int,
    block_bytes: int,
    useful_blocks: int,
    profile: Callable[[], float],
) -> MemoryReport:
    """The pool that `cache.memory` allows.

    Args:
        asked: a share of the device's memory, or a size for the cache.
        explicit: whether the user named it.
        total: bytes of the device's memory.
        block_bytes: bytes of one block over all layers.
        useful_blocks: more than this no set of running requests can use at a time.
        profile: runs a step of the largest shape; returns the factor from what it ran to the largest shape.

    Raises:
        CapacityError: if not even one block fits.
    """
    activations = _measure(device, profile)
    if isinstance(asked, str):
        cache = size_in_bytes(asked)
    elif device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        cache = int(asked * total) - (total - free) - activations
    else:
        cache = int(asked * psutil.virtual_memory().available) - activations
        cache = cache if explicit else min(cache, _CPU_DEFAULT_LIMIT)
    num_blocks = min(cache // max(block_bytes, 1), useful_blocks) + 1  # one more for the null block
    if num_blocks < 2:
        raise CapacityError(
            f"cache.memory = {asked!r} leaves {max(cache, 0)} bytes for the cache and one block takes {block_bytes}",
            fix="raise cache.memory, lower scheduler.max_batched_tokens, or take a smaller model or dtype",
        )
    return MemoryReport(
        total=total, activations=activations, cache=num_blocks * block_bytes, block=block_bytes, num_blocks=num_blocks
    )


def zeroed_bytes(count: int, device: str) -> torch.Tensor:
    """[count] uint8 of zeros.

    On a CPU the pages come zeroed from the system when they are first used, so that a large pool costs nothing until
    then; in huge pages where the system has them, which halves the time that first use takes.
    """
    if device.startswith("cuda"):
        return torch.zeros(count, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, max(count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:count]


def _measure(device: str, profile: Callable[[], float]) -> int:
    """Peak memory of the profiled step beyond what was in use before, in bytes."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        factor = profile()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()
        return int((peak - before) * factor)
    profile()  # what compiling and tuning take is not the step's
    before = _highest()
    factor = profile()
    return int((_highest() - before) * factor)


def _highest() -> int:
    """The most memory that this process has held, in bytes; a step that stays below it needs nothing more."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
