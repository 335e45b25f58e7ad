"""Triton's kernels compiled side by side instead of one after the other, each when its first launch waits for it.

Triton says through hooks of its own which kernel a launch would compile, and takes the description back later. So a
forward pass is gone through once with such launches left out, and what they lacked is compiled by several threads: the
compiler releases Python's lock for most of its work. Nothing depends on it: what could not be compiled ahead is
compiled by its launch, which also says what is wrong with it. And a step that has to wait for the compiler says so.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
from attrs import define, field

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


MissingKernels = dict[tuple[int, str], Missing]
"""By the kernel's `id` and its specialization."""


class Kernel(NamedTuple):
    """A kernel that Triton was asked for and this process had not loaded.

    Attributes:
        name: of Triton's function.
        seconds: what compiling it took; of a kernel in Triton's cache on disk, what finding it did.
        on_disk: whether it was there.
    """

    name: str
    seconds: float
    on_disk: bool


_heard: list[Kernel] = []
"""By all engines of this process, in order."""


@define
class Compiled:
    """What Triton was asked for since this was made."""

    _first: int = field(factory=lambda: len(_heard), init=False)

    @property
    def kernels(self) -> list[Kernel]:
        """In order."""
        return _heard[self._first :]

    @property
    def count(self) -> int:
        """How many were compiled anew: not found in this process or in Triton's cache on disk."""
        return sum(not kernel.on_disk for kernel in self.kernels)


def _knobs() -> Any:
    """Triton's switches; None where nobody has imported Triton, so that nothing can lack a kernel."""
    return getattr(sys.modules.get("triton"), "knobs", None)


class _Listener:
    """What Triton tells of each kernel; whoever listened before is told too."""

    def __init__(self, before: Callable[..., None] | None) -> None:
        self._before = before

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
        _heard.append(Kernel(getattr(src, "name", "a kernel"), times.total / 1e6, cache_hit))  # microseconds
        if self._before is not None:
            self._before(src=src, times=times, cache_hit=cache_hit, **rest)


def listen() -> Compiled:
    """Listen to Triton's compiler from now on, where Triton is loaded; what it is asked for from here."""
    knobs = _knobs()
    if knobs is not None and not isinstance(knobs.compilation.listener, _Listener):
        knobs.compilation.listener = _Listener(knobs.compilation.listener)
    return Compiled()


def waited_for(kernels: Sequence[Kernel]) -> None:
    """Say that a step waited for kernels."""
    anew = [kernel for kernel in kernels if not kernel.on_disk]
    logger.log(
        logging.WARNING if anew else logging.INFO,
        "a step waited %.2f s for Triton, which %s %s",
        sum(kernel.seconds for kernel in kernels),
        f"compiled {len(anew)}:" if anew else "loaded",
        ", ".join(kernel.name for kernel in anew or kernels),
    )


@contextmanager
def leaving_out(missing: MissingKernels) -> Iterator[None]:
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


def compile_all(missing: MissingKernels, device: torch.device | None = None) -> None:
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
