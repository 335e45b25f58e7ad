"""Code that attrs and dataclasses write for classes, compiled once for all starts.

A start makes 400 classes of attrs and 600 dataclasses, torch's and transformers' among them, and compiles the source of
their methods: a tenth of its time. The compiled code is kept in the cache folder by the digest of that source, so
nothing can be stale. attrs mixes a number into the hashes of each class that another process draws anew; kept code has
that of the process that compiled it, and any number does.
"""

from __future__ import annotations
import __future__

import builtins
import hashlib
import marshal
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import CodeType, ModuleType
from typing import Any

from slotline.registry.cache_folder import cache_folder, read_checked, write_checked

_MOST = 20_000
"""Pieces of code above which those of earlier starts are dropped."""
_SALT = re.compile(r"(hash\(\(\s*)-?\d+,")


@contextmanager
def kept_code() -> Iterator[None]:
    """Compile the methods of classes that are made inside at most once for all starts."""
    import dataclasses

    from attr import _make

    codes = _Codes()
    compile_of, run_of = codes.compiler(_make), codes.compiler(dataclasses)

    def run(source: Any, *spaces: Any) -> None:
        exec(run_of(source, "<string>", "exec") if isinstance(source, str) else source, *spaces)

    vars(_make)["compile"] = compile_of
    vars(dataclasses)["exec"] = run
    try:
        yield
    finally:
        del vars(_make)["compile"], vars(dataclasses)["exec"]
        codes.keep()


class _Codes:
    """Compiled code by the digest of its source."""

    def __init__(self) -> None:
        self._kept = _read()
        self._used: dict[bytes, CodeType] = {}

    def compiler(self, caller: ModuleType) -> Any:
        """Return what `compile` is to a module: its statements from the future count for what it compiles."""
        annotations = vars(caller).get("annotations") is __future__.annotations
        flags = __future__.annotations.compiler_flag if annotations else 0

        def compiled(source: Any, filename: str, mode: str, *options: Any) -> Any:
            if options or not isinstance(source, str):
                return builtins.compile(source, filename, mode, *options)
            text = repr((flags, filename, mode, _SALT.sub(r"\1,", source)))
            key = hashlib.sha256(text.encode()).digest()
            code = self._used.get(key) or self._kept.get(key)
            if code is None:
                code = builtins.compile(source, filename, mode, flags, dont_inherit=True)
            self._used[key] = code
            return code

        return compiled

    def keep(self) -> None:
        """Write what was compiled, if anything was new."""
        if self._used.keys() <= self._kept.keys():
            return
        together = {**self._kept, **self._used}
        content = marshal.dumps(together if len(together) <= _MOST else self._used)
        with suppress(OSError):  # without it the next start compiles again
            write_checked(cache_folder() / _name(), content)


def _read() -> dict[bytes, CodeType]:
    """Return what earlier starts compiled: nothing if the file is missing or damaged."""
    try:
        content = read_checked(cache_folder() / _name())
    except OSError:  # there is no cache folder
        return {}
    return {} if content is None else marshal.loads(content)


def _name() -> str:
    """Return the file's name, another one for each Python."""
    python = repr((sys.version, sys.flags.optimize))
    return f"classes-{hashlib.sha256(python.encode()).hexdigest()[:16]}.code"
