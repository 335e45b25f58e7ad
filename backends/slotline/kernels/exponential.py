"""exp for kernels compiled by numba, free of calls, so that loops over it become vectors."""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def _power_of_two(typingctx: Any, exponent: Any) -> Any:
    """Return 2 ** exponent for an int32 exponent from -126 to 127, by writing the bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        biased = builder.add(args[0], ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.int32), codegen


@njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, fastmath=True)
def exp(x: Any) -> Any:
    """Return exp of a float32 x <= 0, to about one unit in the last place, 0 below -87.

    Cody-Waite reduction, Cephes polynomial (expf).
    """
    clamped = max(x, np.float32(-87.0))
    n = np.floor(clamped * np.float32(1.44269504088896341) + np.float32(0.5))
    r = clamped - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    return y * _power_of_two(np.int32(n)) if x >= np.float32(-87.0) else np.float32(0.0)
