"""Functions compiled by numba whose machine code is kept in the cache folder.

numba's own cache is next to the source file, which an installation may forbid, and two processes that compile at once
may mix up the files in its index. Here each compiled form has its own file, named after everything that it depends on:
the source file, numba, the processor, the options and the types.

Symbols in these files must not meet. numba ends the symbol of each function with the number of functions that its
process compiled before. Two processes thus give one symbol to different code. The linker of a process that loads both
would keep the first function of a symbol and call it from both kernels. So here numba gets random numbers to count by.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import pickle
import secrets
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import ir
from llvmlite.binding import address_of_symbol
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from slotline.kernels.kernel_files import read_kernel, write_kernel

logger = logging.getLogger("slotline")

_FORM = 3
"""Number of what a file has: names that the machine code calls, and the code, with symbols like no other file's."""

FunctionIdentity._unique_ids = iter(partial(secrets.token_hex, 8), None)  # also for functions that a kernel calls


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like `numba.njit` with these options, whose compiled forms are kept for the next start."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(**options)(function)
        if hasattr(compiled, "_cache"):  # NUMBA_DISABLE_JIT gives the function back
            compiled._cache = KernelCache(function, options)
        return compiled

    return decorate


def cached_cfunc(signature: Any, function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function as `numba.cfunc` does, or take it from the cache folder.

    Returns:
        The C callback, whose `address` native code calls.
    """
    compiled: Any = CFunc(function, normalize_signature(signature), locals={}, options=options)
    compiled._cache = KernelCache(function, options)
    compiled.compile()
    return compiled


class KernelCache(NullCache):  # type: ignore[misc]
    """numba's cache of one function and its options, in the cache folder, or in `NUMBA_CACHE_DIR` where that is set."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function = function
        self._options = repr(sorted((key, _plain(value)) for key, value in options.items()))

    @property
    def cache_path(self) -> str | None:
        """Folder that numba's statistics show. None for the cache folder's own."""
        return numba.config.CACHE_DIR or None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the stored machine code for a signature, or None if there is none that can be loaded.

        numba's own cache imports all that a compiler needs first, which takes longer than the rest. That is only done
        where the code calls something that is not loaded yet.
        """
        name = self._name(sig, target_context.codegen())
        kernel = None if name is None else read_kernel(name, _folder())
        if kernel is None:
            return None
        try:
            called, made = pickle.loads(kernel)
            rtsys.initialize(target_context)
            if any(address_of_symbol(symbol) is None for symbol in called):
                target_context.refresh()
            return CompileResult._rebuild(target_context, *made)
        except Exception as error:  # whatever unpickling and linking may raise
            logger.warning("the kept kernel %s cannot be loaded and is compiled again: %s", name, error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the machine code that was compiled for a signature."""
        name = self._name(sig, data.codegen)
        if name is None or data.lifted or data.library.has_dynamic_globals:
            return
        write_kernel(name, dumps((_called(data.library), data._reduce())), _folder())

    def _name(self, sig: Any, codegen: Any) -> str | None:
        """Return the file's name, or None for a function whose source cannot be read."""
        code = _code(self._function)
        if code is None:
            return None
        versions = _FORM, numba.__version__, llvmlite.__version__, sys.version, codegen.magic_tuple()
        key = repr((versions, code, self._options, repr(sig)))
        return f"{self._function.__name__}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.nbc"


def _called(library: Any) -> list[str]:
    """Return the functions and variables that machine code uses and does not have itself."""
    module = library._final_module
    return [
        value.name
        for values in (module.functions, module.global_variables)
        for value in values
        if value.is_declaration and not value.name.startswith("llvm.")
    ]


def _code(value: Any) -> Any:
    """Return what a function depends on, the same in every process. None if its source cannot be read.

    numba gives intrinsics and compiled functions a random number in each process, so a function that is made with one
    is described by the Python function behind it.
    """
    if isinstance(value, ir.Type | ir.Value):  # their use leaves traces in them
        return type(value).__name__, str(value)
    function = getattr(value, "py_func", getattr(value, "_defn", value))
    if not inspect.isfunction(function):
        return dumps(value)
    if (source := _digest_of(inspect.getfile(function))) is None:
        return None
    closure = [_code(cell.cell_contents) for cell in function.__closure__ or ()]
    if None in closure:
        return None
    return function.__module__, function.__qualname__, function.__code__.co_firstlineno, source, closure


def _folder() -> Path | None:
    return Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else None


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else value


@cache
def _digest_of(file: str) -> str | None:
    """Return the digest of a source file: of all of it, since a function is compiled together with those it calls."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None
