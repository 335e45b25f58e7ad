"""Threads that run the shares of a compiled kernel."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from slotline.backends.linear import numba_kernels as kernels
from slotline.kernels.torch_threads import torch_team

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t)


class Workers:
    """Threads of torch's pool, or of numba's where that cannot be reached.

    Attributes:
        count: number of threads.
    """

    def __init__(self) -> None:
        self.count = max(1, min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS)))
        self._team = torch_team() if self.count > 1 else None

    def run(self, kernel: Any, told: np.ndarray[Any, Any], threads: int) -> None:
        """Run a C function of `numba_kernels` or `vnni_kernels` with the numbers that it is told, in some threads."""
        told[kernels.THREADS] = threads
        own, team = told.ctypes.data, self._team
        if threads == 1:
            _directly(kernel)(own, 0)
        elif team is None:
            kernels.on_threads(kernel.address, told, threads)
        else:
            told[kernels.KERNEL : kernels.PLACES] = kernel.address, team.thread_num, team.num_threads, own
            team.run(kernels.member().address, own, threads)


@cache
def _directly(kernel: Any) -> Any:
    return _CALL(kernel.address)
