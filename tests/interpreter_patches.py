"""Triton's interpreter in half the time.

It replaces the functions of `triton.language` by its own before a kernel runs, which is needed, and again before each
call of a device function, by looking at every member of six modules and classes; that took as long as the arithmetic.
"""

from __future__ import annotations

import sys
from typing import Any


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
