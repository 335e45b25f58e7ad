"""Triton's kernels compiled side by side instead of one after the other, each when its first launch waits for it.

Triton says through hooks of its own which kernel a launch would compile, and takes the description back later. So a
forward pass is gone through once with such launches left out, and what they lacked is compiled by several threads: the
compiler releases Python's lock for most of its work. Nothing depends on it: what could not be compiled ahead is
compiled by its launch, which also says what is wrong with it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
from attrs import define

logger = logging.getLogger("slotline")
MOST_THREADS = 16


class Missing(NamedTuple):
    """A kernel that a launch lacked.

    Attributes:
        kernel: Triton's function.
        specialization: what it is to be compiled for, in Triton's own words.
    """

    kernel: Any
    specialization: str


@define
class Compiled:
    """How many kernels were compiled anew: not found in this process or in Triton's cache on disk."""

    count: int = 0


def _knobs() -> Any:
    """Triton's switches; None where nobody has imported Triton, so that nothing can lack a kernel."""
    return getattr(sys.modules.get("triton"), "knobs", None)


@contextmanager
def counting() -> Iterator[Compiled]:
    """Count what is compiled inside; stays at 0 where someone else already listens to the compiler."""
    found, knobs = Compiled(), _knobs()
    if knobs is None or knobs.compilation.listener is not None:
        yield found
        return

    def heard(*, cache_hit: bool, **_: Any) -> None:
        found.count += not cache_hit

    knobs.compilation.listener = heard
    try:
        yield found
    finally:
        knobs.compilation.listener = None


@contextmanager
def leaving_out(missing: dict[tuple[int, str], Missing]) -> Iterator[None]:
    """Inside, launches whose kernel this process has not loaded are left out and noted in `missing`."""
    knobs = _knobs()
    if knobs is None or knobs.runtime.jit_cache_hook is not None:
        yield
        return

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        lacked = Missing(fn.jit_function, compile["specialization_data"])
        missing[id(lacked.kernel), lacked.specialization] = lacked
        return True

    knobs.runtime.jit_cache_hook = note
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = None


def compile_all(missing: dict[tuple[int, str], Missing], device: torch.device | None = None) -> None:
    """Compile kernels for a device, several at a time. What fails is left to its launch."""
    if not missing:
        return
    start, threads = perf_counter(), min(len(missing), MOST_THREADS, len(os.sched_getaffinity(0)))

    def compile_one(lacked: Missing) -> bool:
        try:
            with torch.cuda.device(device):  # a thread's current device is its own
                lacked.kernel.preload(lacked.specialization)
        except Exception as error:  # whatever a compiler raises
            logger.debug("%s was not compiled ahead: %s", lacked.kernel, error)
            return False
        return True

    with ThreadPoolExecutor(threads, thread_name_prefix="slotline-compile") as pool:
        done = sum(pool.map(compile_one, missing.values()))
    logger.info(
        "compiled %d of %d kernels ahead, %d at a time: %.1f s", done, len(missing), threads, perf_counter() - start
    )
