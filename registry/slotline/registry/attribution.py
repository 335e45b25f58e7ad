"""Attribution of exceptions: from a traceback to the plugin, its distribution and a remedy.

Calls into plugins are not wrapped individually. Building and stepping an engine is wrapped once, and the frames of the
traceback are examined only after an exception.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any, ParamSpec, TypeVar

from attrs import define, field, frozen

from slotline.registry.contracts.extension import CARRIED
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import PluginError, SlotlineError
from slotline.registry.loading import label_of, one_line, remedy_for

P = ParamSpec("P")
R = TypeVar("R")
_OURS = ("slotline.core", "slotline.registry")
"""Code that calls plugins and is none."""


@frozen(eq=False)
class BuiltPlugin:
    """Object made by a plugin's factory.

    Attributes:
        name: the plugin and its source, as in ``attention:cpu of slotline 1.0``.
        remedy: advice to a user who has to do without it.
        built: the object.
        modules: names of the modules that its code may be in. Their packages count as well.
    """

    name: str
    remedy: str
    built: Any
    modules: frozenset[str]

    def has(self, module: str, *, package: bool) -> bool:
        """Return True if a module is one of the plugin's, or in the package of one."""
        if not package:
            return module in self.modules
        packages = {own.rpartition(".")[0] or own for own in self.modules}
        return any(module == one or module.startswith(f"{one}.") for one in packages)


@define(eq=False)
class BuiltPlugins:
    """Objects made by the factories of an engine's plugins, in order."""

    _built: list[BuiltPlugin] = field(factory=list)
    _carriers: set[str] = field(factory=set)  # packages of our extensions, which call plugins and are none

    def add(self, descriptor: Descriptor[Any], source: str, built: Any) -> None:
        """Remember a built object.

        Args:
            descriptor: the plugin.
            source: the plugin's distribution and version, or its file.
            built: the object made by its factory.
        """
        factory = descriptor.factory
        if descriptor.kind is Kind.EXTENSION and descriptor.name in CARRIED and str(factory).startswith("slotline."):
            self._carriers.add(str(factory).partition(":")[0].rpartition(".")[0])
            return
        found = [getattr(built, "__module__", None), getattr(type(built), "__module__", None)]
        found.append(factory.partition(":")[0].strip() if isinstance(factory, str) else _module_of(factory))
        modules = frozenset(name for name in found if isinstance(name, str) and not _is_library(name))
        name = f"{label_of(descriptor)} of {source}"
        self._built.append(BuiltPlugin(name, remedy_for(descriptor.kind), built, modules))

    def named(self, error: BaseException) -> BaseException:
        """Return a `PluginError` that names the plugin whose code raised, with the cause chained, or the error itself.

        Slotline's own errors, errors that mean too little memory, and errors outside plugins are returned unchanged.
        """
        plugin = self._raiser(error)
        if plugin is None:
            return error
        named = PluginError(
            f"{plugin.name} failed: {one_line(error)}",
            fix=f"{plugin.remedy}; the cause is chained (--traceback shows it)",
        )
        named.__cause__ = error
        return named

    def described(self, error: BaseException) -> str:
        """Return the text of an error for a request: its type, its message, and the plugin whose code raised it."""
        plugin, text = self._raiser(error), f"{type(error).__name__}: {error}"
        return text if plugin is None else f"{text}, raised by {plugin.name}\n  fix: {plugin.remedy}"

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Name the plugin in exceptions raised by the code inside."""
        try:
            yield
        except (Exception, SystemExit) as error:
            named = self.named(error)
            if named is error:
                raise
            raise named from error

    def _raiser(self, error: BaseException) -> BuiltPlugin | None:
        """Return the innermost plugin in the error's traceback, if it may be blamed."""
        if isinstance(error, (SlotlineError, MemoryError, KeyboardInterrupt)):
            return None
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            return None
        frames = [(str(f.f_globals.get("__name__", "")), f) for f, _ in traceback.walk_tb(error.__traceback__)][::-1]
        if isinstance(error, SystemExit):  # a signal's handler exits in whatever code is running
            frames = [(module, frame) for module, frame in frames if module != "_sitebuiltins"][:1]
        maybe = [
            plugin for plugin in self._built if plugin.built is getattr(error, "obj", self)
        ]  # a method of a missing feature
        for module, frame in frames:
            if _is_ours(module) or any(module.startswith(f"{package}.") for package in self._carriers):
                called = self._called_by(frame)
                return next((plugin for plugin in called if plugin in maybe), (*maybe, *called, None)[0])
            if receiver := self._receiver(frame):
                return receiver
            maybe = maybe or self._in_module(module)
        return maybe[0] if maybe else None

    def _receiver(self, frame: FrameType) -> BuiltPlugin | None:
        """Return the plugin whose method a frame runs."""
        code = frame.f_code
        if not code.co_argcount:
            return None
        first = frame.f_locals.get(code.co_varnames[0])
        return next((plugin for plugin in self._built if plugin.built is first), None)

    def _in_module(self, module: str) -> list[BuiltPlugin]:
        """Return the plugins that a module may belong to, exact matches before matches by package."""
        exact = [plugin for plugin in self._built if plugin.has(module, package=False)]
        return exact or [plugin for plugin in self._built if plugin.has(module, package=True)]

    def _called_by(self, frame: FrameType) -> list[BuiltPlugin]:
        """Return the plugins whose methods a frame of ours holds, for a call that failed before entering their code."""
        values = frame.f_locals.values()
        owners = [value.__self__ if isinstance(value, MethodType) else value for value in values]
        return [plugin for plugin in self._built if any(owner is plugin.built for owner in owners)]


def _is_ours(module: str) -> bool:
    return any(module == own or module.startswith(f"{own}.") for own in _OURS)


def _is_library(module: str) -> bool:
    """Return True for modules of shared libraries, which do not identify a plugin."""
    top = module.partition(".")[0]
    return _is_ours(module) or top in sys.stdlib_module_names or top in ("numpy", "torch")


def _module_of(factory: Any) -> Any:
    """Return the name of the module that defines a factory. For a partial, of the function that it wraps."""
    return getattr(getattr(factory, "func", factory), "__module__", None)


def names_plugins(method: Callable[P, R]) -> Callable[P, R]:
    """Wrap a method so that exceptions of a plugin's code name the plugin. The object's `plugins` are searched."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except (Exception, SystemExit) as error:
            named = args[0].plugins.named(error)  # type: ignore[attr-defined]
            if named is error:
                raise
            raise named from error

    return call
