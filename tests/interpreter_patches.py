"""Triton's interpreter in half the time, and its products with sums in one order.

It replaces the functions of `triton.language` by its own before a kernel runs, which is needed, and again before each
call of a device function, by looking at every member of six modules and classes; that took as long as the arithmetic.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest


def patch_once_a_launch() -> None:
    """Have the functions replaced once a launch for each module with device functions, if the interpreter is loaded."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "replaced"):
        return
    interpreter.replaced = set()  # the globals of functions for which it was done in the launch that runs
    replace, run = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def replace_once(fn: Any) -> Any:
        if id(fn.__globals__) in interpreter.replaced:
            return None
        interpreter.replaced.add(id(fn.__globals__))
        return replace(fn)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter.replaced.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            interpreter.replaced.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch


def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `tl.dot` sum each element in the same order, wherever its row lies.

    The interpreter asks NumPy, whose BLAS takes rows in groups by the processor's registers: on some processors a row's
    bits depend on its place. Those of a GPU's matrix instructions do not, and tests of batch invariance rely on it.
    """
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (part.data.astype(d.data.dtype) for part in (a, b))
        shares = left[..., :, :, None] * right[..., None, :, :]  # [..., m, k, n]
        return interpreter.TensorHandle(np.add.reduce(shares, axis=-2) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
