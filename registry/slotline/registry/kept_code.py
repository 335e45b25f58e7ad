"""Code that attrs and dataclasses write for classes, and regular expressions, compiled once for all starts.

A start makes 400 classes of attrs and 600 dataclasses, torch's and transformers' among them, and compiles the source of
their methods and 1,300 regular expressions: a seventh of its time. What was compiled is kept in the cache folder by the
digest of its source, so nothing can be stale. attrs mixes a number into the hashes of each class that another process
draws anew; kept code has that of the process that compiled it, and any number does.
"""

from __future__ import annotations
import __future__

import builtins
import hashlib
import marshal
import re
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from types import ModuleType
from typing import Any

from slotline.registry.cache_folder import cache_folder, read_checked, write_checked

_MOST = 20_000
"""Pieces of code above which those of earlier starts are dropped."""
_SALT = re.compile(r"(hash\(\(\s*)-?\d+,")


@contextmanager
def kept_code() -> Iterator[None]:
    """Compile methods of classes and regular expressions that are made inside at most once for all starts.

    These contexts nest, and threads may be in several at a time: what is new is kept when the last one ends.
    """
    _REPLACED.begin()
    try:
        yield
    finally:
        _REPLACED.end()


class _Replaced:
    """Replacement of compilers in this process, in place while any thread wants it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._wanted = 0
        self._restore: Callable[[], None] = lambda: None

    def begin(self) -> None:
        with self._lock:
            if self._wanted == 0:
                self._restore = _replace()
            self._wanted += 1

    def end(self) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0:
                self._restore()


_REPLACED = _Replaced()


def _replace() -> Callable[[], None]:
    """Replace the compilers of attrs, dataclasses and regular expressions. Return what ends that."""
    import _sre  # type: ignore[import-not-found]  # the matcher, built in
    import dataclasses
    from re import _compiler  # type: ignore[attr-defined]

    from attr import _make

    codes = _Codes()
    compile_of, run_of = codes.compiler(_make), codes.compiler(dataclasses)
    compile_pattern = _compiler.compile

    def run(source: Any, *spaces: Any) -> None:
        exec(run_of(source, "<string>", "exec") if isinstance(source, str) else source, *spaces)

    def restore() -> None:
        del vars(_make)["compile"], vars(dataclasses)["exec"]
        _compiler.compile = compile_pattern
        codes.keep()

    vars(_make)["compile"] = compile_of
    vars(dataclasses)["exec"] = run
    _compiler.compile = codes.pattern_compiler(compile_pattern, _compiler, _sre.compile)
    return restore


class _Codes:
    """Compiled code by the digest of its source. That of a regular expression has its flags and groups with it."""

    def __init__(self) -> None:
        self._kept = _read()
        self._used: dict[bytes, Any] = {}

    def compiler(self, caller: ModuleType) -> Any:
        """Return what `compile` is to a module: its statements from the future count for what it compiles."""
        annotations = vars(caller).get("annotations") is __future__.annotations
        flags = __future__.annotations.compiler_flag if annotations else 0

        def compiled(source: Any, filename: str, mode: str, *options: Any) -> Any:
            if options or not isinstance(source, str):
                return builtins.compile(source, filename, mode, *options)
            asked = flags, filename, mode, _SALT.sub(r"\1,", source)
            return self._made(asked, lambda: builtins.compile(source, filename, mode, flags, dont_inherit=True))

        return compiled

    def pattern_compiler(self, plain: Callable[..., Any], parts: Any, matcher: Callable[..., Any]) -> Any:
        """Return what `re` compiles with: `plain`, in whose place `parts` parse and translate what is not kept."""

        def translated(pattern: str | bytes, flags: int) -> tuple[Any, ...]:
            parsed = parts._parser.parse(pattern, flags)
            code, state = parts._code(parsed, flags), parsed.state
            return array("I", code).tobytes(), flags | state.flags, state.groups, dict(state.groupdict)

        def compiled(pattern: Any, flags: int = 0) -> Any:
            if not isinstance(pattern, str | bytes) or flags & re.DEBUG:  # which prints
                return plain(pattern, flags)
            code, found, groups, names = self._made((pattern, int(flags)), lambda: translated(pattern, flags))
            numbered = {number: name for name, number in names.items()}
            by_number = tuple(map(numbered.get, range(groups)))
            return matcher(pattern, found, array("I", code).tolist(), groups - 1, dict(names), by_number)

        return compiled

    def _made(self, asked: object, make: Callable[[], Any]) -> Any:
        """Return what an earlier start made of the same source, or make it."""
        key = hashlib.sha256(repr(asked).encode(errors="surrogatepass")).digest()
        made = self._used.get(key) or self._kept.get(key)
        if made is None:
            made = make()
        self._used[key] = made
        return made

    def keep(self) -> None:
        """Write what was compiled, if anything was new."""
        if self._used.keys() <= self._kept.keys():
            return
        together = {**self._kept, **self._used}
        content = marshal.dumps(together if len(together) <= _MOST else self._used)
        with suppress(OSError):  # without it the next start compiles again
            write_checked(cache_folder() / _name(), content)


def _read() -> dict[bytes, Any]:
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
