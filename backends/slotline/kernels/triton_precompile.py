"""Triton's kernels compiled side by side instead of one after the other, each when its first launch waits for it.

Triton reports through hooks which kernel a launch would compile, and accepts the description later. A forward pass is
run once without these launches, and the missing kernels are compiled by several threads, since the compiler releases
Python's lock for most of its work. Nothing depends on this: a kernel that could not be compiled ahead is compiled by
its launch, which also reports errors. A step that has to wait for the compiler logs it.

Triton's hooks belong to the whole process. Ours act for the thread that asks, and only there: what other threads launch
is neither left out nor counted. Hooks that were there before are called too.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock, Thread, get_ident
from time import perf_counter
from typing import Any, NamedTuple, Self

import torch
from attrs import define, field

from slotline.registry.contracts.device import CompiledKernel as Kernel

logger = logging.getLogger("slotline")
MOST_THREADS = 16


class MissingKernel(NamedTuple):
    """A kernel that a launch lacked.

    Attributes:
        kernel: Triton's function.
        specialization: what it is to be compiled for, in Triton's own words.
    """

    kernel: Any
    specialization: str


MissingKernels = dict[tuple[int, str], MissingKernel]
"""By the kernel's `id` and its specialization."""


_logs: dict[int, list[Kernel]] = {}
"""What Triton was asked for, by the thread that asked."""


def log_to(log: list[Kernel] | None) -> list[Kernel] | None:
    """Log this thread's kernels in a list from now on, or nowhere, and return the previous list."""
    me = get_ident()
    before = _logs.get(me)
    if log is not None:
        _logs[me] = log
    elif before is not None:
        del _logs[me]
    return before


class KernelLog:
    """Log of the kernels that this thread asks Triton for inside a `with` statement. Outer logs get none of them.

    Attributes:
        kernels: the kernels in order.
    """

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def __enter__(self) -> Self:
        self._outer = log_to(self.kernels)
        return self

    def __exit__(self, *error: object) -> None:
        log_to(self._outer)


@define
class Compiled:
    """Kernels that this thread's log got since the creation of this object."""

    _log: list[Kernel] = field(factory=lambda: _logs.setdefault(get_ident(), []), init=False)
    _first: int = field(init=False)

    @_first.default
    def _so_far(self) -> int:
        return len(self._log)

    @property
    def kernels(self) -> list[Kernel]:
        """In order."""
        return self._log[self._first :]

    @property
    def count(self) -> int:
        """Number of newly compiled kernels: not found in this process or in Triton's cache on disk."""
        return sum(not kernel.on_disk for kernel in self.kernels)


@cache
def hash_ahead() -> Thread | None:
    """Have Triton hash its own half a gigabyte in a thread, which the first kernel would wait for, and return that.

    None without Triton, or where it hashes itself in another way.
    """
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        thread = Thread(target=triton_key, name="slotline-triton-key", daemon=True)  # an end waits for no answer
        thread.start()
        return thread
    return None


def _knobs() -> Any:
    """Return Triton's switches, or None if Triton has not been imported, so that no kernel can be missing."""
    return getattr(sys.modules.get("triton"), "knobs", None)


class _Listener:
    """Writer of the logs. It also calls the previous listener."""

    def __init__(self, before: Callable[..., None] | None) -> None:
        self._before = before

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
        log = _logs.pop(get_ident(), None)  # a second listener of ours, below one of the host's, finds none
        try:
            if log is not None:
                log.append(Kernel(getattr(src, "name", "a kernel"), times.total / 1e6, cache_hit))  # microseconds
            if self._before is not None:
                self._before(src=src, times=times, cache_hit=cache_hit, **rest)
        finally:
            if log is not None:
                _logs[get_ident()] = log


def listen() -> Compiled:
    """Listen to Triton's compiler from now on, if Triton is loaded, and return this thread's kernels from here on."""
    knobs = _knobs()
    if knobs is not None and not isinstance(knobs.compilation.listener, _Listener):
        knobs.compilation.listener = _Listener(knobs.compilation.listener)
    return Compiled()


def waited_for(kernels: Sequence[Kernel]) -> None:
    """Log that a step waited for kernels."""
    anew = [kernel for kernel in kernels if not kernel.on_disk]
    logger.log(
        logging.WARNING if anew else logging.INFO,
        "a step waited %.2f s for Triton, which %s %s",
        sum(kernel.seconds for kernel in kernels),
        f"compiled {len(anew)}:" if anew else "loaded",
        ", ".join(kernel.name for kernel in anew or kernels),
    )


class _Notes:
    """Hook for launches that lack a kernel: it leaves out those of the threads that have a place to note them.

    Attributes:
        before: the hook that was there before. It is asked too, and may leave out launches of any thread.
        missing: where kernels are noted, by thread.
    """

    current: _Notes | None = None
    changing = Lock()

    def __init__(self, before: Callable[..., bool | None] | None) -> None:
        self.before = before
        self.missing: dict[int, MissingKernels] = {}

    def __call__(self, *, fn: Any, compile: Any, **rest: Any) -> bool | None:
        left_out = None if self.before is None else self.before(fn=fn, compile=compile, **rest)
        missing = self.missing.get(get_ident())
        if missing is None:
            return left_out
        lacked = MissingKernel(fn.jit_function, compile["specialization_data"])
        missing[id(lacked.kernel), lacked.specialization] = lacked
        _EARLY.begin(lacked)
        return True


class _Early:
    """Compilation that begins when a launch lacks a kernel, while further launches are noted.

    What is made goes to Triton's cache on disk alone: a kernel that this process has is not left out, and its first
    launch would load it in the middle of a capture.

    Attributes:
        wanted: whether the last kernels that were asked for had to be compiled. Otherwise they are on disk.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._begun: dict[tuple[int, str], Future[list[Kernel]]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, lacked: MissingKernel) -> None:
        """Begin to compile a kernel, once, if that is wanted."""
        key = id(lacked.kernel), lacked.specialization
        if self.wanted and key not in self._begun:
            from triton.runtime.driver import driver

            self._pool = self._pool or ThreadPoolExecutor(_most_threads(), thread_name_prefix="slotline-compile")
            self._begun[key] = self._pool.submit(_compile_to_disk, lacked, driver.active.get_current_device())

    def finish(self, lacked: MissingKernel) -> list[Kernel]:
        """Wait for a kernel that was begun, and return what Triton was asked for. Nothing if it was not begun."""
        begun = self._begun.pop((id(lacked.kernel), lacked.specialization), None)
        return [] if begun is None else begun.result()

    def end(self) -> None:
        """End the threads once they are idle."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


_EARLY = _Early()


def _most_threads() -> int:
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def _compile_to_disk(lacked: MissingKernel, device: int) -> list[Kernel]:
    """Compile a kernel for a device without giving it to this process. What fails is left to its launch."""
    log = _logs[get_ident()] = list[Kernel]()
    try:
        alone = copy.copy(lacked.kernel)
        alone.device_caches = defaultdict(alone.create_binder)
        with torch.cuda.device(device):
            alone.preload(lacked.specialization)
    except Exception as error:  # whatever a compiler raises
        logger.debug("%s was not compiled early: %s", lacked.kernel, error)
    finally:
        del _logs[get_ident()]
    return log


@contextmanager
def leaving_out(missing: MissingKernels) -> Iterator[None]:
    """Leave out this thread's launches whose kernel this process has not loaded, and note them in `missing`."""
    knobs, me = _knobs(), get_ident()
    if knobs is None:
        yield
        return
    with _Notes.changing:
        if (notes := _Notes.current) is None:
            notes = _Notes.current = knobs.runtime.jit_cache_hook = _Notes(knobs.runtime.jit_cache_hook)
        outer = notes.missing.get(me)
        notes.missing[me] = missing
    try:
        yield
    finally:
        with _Notes.changing:
            if outer is not None:
                notes.missing[me] = outer
            else:
                del notes.missing[me]
            if not notes.missing:
                _Notes.current = None
                if (
                    knobs.runtime.jit_cache_hook is notes
                ):  # otherwise another one is above it, and it lets everything pass
                    knobs.runtime.jit_cache_hook = notes.before


def compile_all(missing: MissingKernels, device: torch.device | None = None) -> None:
    """Compile kernels for a device, several at a time. What fails is left to its launch."""
    if not missing:
        return
    start, threads = perf_counter(), min(len(missing), _most_threads())
    log = _logs.get(get_ident(), [])
    first = len(log)

    def compile_one(lacked: MissingKernel) -> bool:
        log.extend(_EARLY.finish(lacked))
        _logs[get_ident()] = log
        try:
            with torch.cuda.device(device):  # a thread's current device is its own
                lacked.kernel.preload(lacked.specialization)
        except Exception as error:  # whatever a compiler raises
            logger.debug("%s was not compiled ahead: %s", lacked.kernel, error)
            return False
        finally:
            _logs.pop(get_ident(), None)
        return True

    with ThreadPoolExecutor(threads, thread_name_prefix="slotline-compile") as pool:
        done = sum(pool.map(compile_one, missing.values()))
    _EARLY.end()
    _EARLY.wanted = any(not kernel.on_disk for kernel in log[first:])
    logger.info(
        "compiled %d of %d kernels ahead, %d at a time: %.1f s", done, len(missing), threads, perf_counter() - start
    )
