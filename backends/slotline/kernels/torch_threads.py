"""The pool of threads that torch's products run on, for kernels of our own.

A second pool beside it costs more than it gives: each keeps its threads spinning for a while after its work, on the
cores that the other needs. So kernels are started through the OpenMP library that torch has loaded.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from attrs import frozen

_NAMES = ("libgomp", "libiomp5", "libomp")


@frozen(eq=False)
class Team:
    """Entry points of the OpenMP library.

    Attributes:
        library: keeps it loaded.
        thread_num, num_threads: addresses of ``omp_get_thread_num`` and ``omp_get_num_threads``.
        barrier: address of ``GOMP_barrier``, by which the threads of a team wait for each other.
    """

    library: ctypes.CDLL
    thread_num: int
    num_threads: int
    barrier: int

    def run(self, address: int, data: int | bytes, threads: int) -> None:
        """Call the C function ``void(void *)`` at an address once in each thread."""
        self.library.GOMP_parallel(address, data, threads, 0)


@cache
def torch_team() -> Team | None:
    """Return the library's entry points, or None where it cannot be found: on other systems, or without OpenMP."""
    torch.ones(1 << 16).sum()  # so that it is loaded
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = dict.fromkeys(line.split()[-1] for line in lines if "/" in line)
    found = [path for path in paths if Path(path).name.startswith(_NAMES) and "torch" in path]
    if len(found) != 1:  # two of them, and it is not known which one torch uses
        return None
    try:
        library = ctypes.CDLL(found[0])
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
        names = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
        own = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    except (OSError, AttributeError):
        return None
    return Team(library, *own) if all(own) else None
