"""transformers' modeling code, imported without packages that no model here needs. Import this before `transformers`.

Half of the time to import `transformers.modeling_utils` goes to SciPy's optimizers, for a loss of object detectors, to
torch's compiler, for decorators that only matter to it, and to a second look into each of transformers' 2,300 files.
While the modules below are imported

- functions that are imported by name and only called later (`_LATER`) are objects that import them when called,
- decorators of `torch._dynamo` mark functions as torch's own would, as soon as that package is imported,
- the contents of transformers' folders are remembered from the first look to the second.

All of it looks at what transformers asks for, so a release that asks for other names gets them as always. Imports of
other packages and of later moments are not touched.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import Lock
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch

_MODELING = ("transformers.modeling_utils", "transformers.generation.utils")
_COMPILER = "torch._dynamo"
_DISABLED = "__dynamo_disable"
"""Attribute in which `torch._compile` keeps what `torch._dynamo.disable` made of a function."""
_TRACING = "torch._dynamo._trace_wrapped_higher_order_op"
_LATER: Mapping[str, frozenset[str]] = MappingProxyType(
    {"scipy.optimize": frozenset({"linear_sum_assignment"}), _TRACING: frozenset({"TransformGetItemToIndex"})}
)
"""Names that transformers imports from a module and only calls."""


class Later:
    """Function of a module that is imported when it is called first."""

    def __init__(self, module: str, name: str, holder: dict[str, Any]) -> None:
        self._module, self._name, self._holder = module, name, holder

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the function."""
        return self.settle()(*args, **named)

    def settle(self) -> Any:
        """Put the function in place of this object where that was imported to. Return the function."""
        function = getattr(importlib.import_module(self._module), self._name)
        for name, value in list(self._holder.items()):
            if value is self:
                self._holder[name] = function
        return function


class CompilerMarks:
    """Decorators of `torch._dynamo` for a time at which it is not imported.

    Attributes:
        laters: functions that are imported together with that package.
    """

    def __init__(self) -> None:
        self.laters: list[Later] = []
        self._marked: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []
        self._called: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """Return what is none of the decorators, from the package itself."""
        if name.startswith("__"):
            raise AttributeError(name)
        if vars(torch).get("_dynamo") is self:
            del torch._dynamo
        return getattr(importlib.import_module(_COMPILER), name)

    def allow_in_graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `torch.compiler.allow_in_graph`."""
        self._marked.append(("allow_in_graph", function, {}))
        return function

    def assume_constant_result(self, function: Any) -> Any:
        """See `torch.compiler.assume_constant_result`."""
        function._dynamo_marked_constant = True
        return function

    def disable(self, function: Any = None, recursive: bool = True, **named: Any) -> Any:
        """See `torch.compiler.disable`. torch's own functions ask for it when they are called first."""
        options = {"recursive": recursive, **named}
        if named.get("wrapping") is False:
            self._called.append(function)
            return function
        if function is None:
            return partial(self.disable, **options)
        if "<locals>" in function.__qualname__:  # there is no place to put the decorated one later
            return self.__getattr__("disable")(function, **options)
        self._marked.append(("disable", function, options))
        return function

    def settle(self, compiler: Any) -> None:
        """Repeat with the package what its decorators were called with."""
        for decorator, function, options in self._marked:
            marked = getattr(compiler, decorator)(function, **options)
            if marked is not function:
                _replace(function, marked)
        for function in self._called:
            vars(function).pop(_DISABLED, None)  # it asks again
        for later in self.laters:
            later.settle()


class CompilerFinder(MetaPathFinder):
    """Finder of `torch._dynamo` that settles marks once that is imported. It finds it once."""

    def __init__(self, marks: CompilerMarks) -> None:
        self._marks = marks

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        if fullname != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_settle(module: ModuleType) -> None:
                execute(module)
                self._marks.settle(module)

            spec.loader.exec_module = execute_and_settle  # type: ignore[method-assign]
        return spec


def _replace(function: Callable[..., Any], marked: Callable[..., Any]) -> None:
    """Put a decorated function where the plain one is: in its module, or in a class of it."""
    owner: Any = sys.modules[function.__module__]
    *classes, name = function.__qualname__.split(".")
    for inner in classes:
        owner = getattr(owner, inner)
    if vars(owner).get(name) is function:
        setattr(owner, name, marked)


class _Imports:
    """Lighter imports of the process, in place while any thread wants them."""

    def __init__(self) -> None:
        self._marks = CompilerMarks()
        self._lock = Lock()
        self._wanted = 0
        self._restore: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._wanted += 1
            if self._wanted == 1:
                self._replace(builtins, "__import__", partial(self._import, builtins.__import__))
                if _COMPILER not in sys.modules:
                    self._put_off_compiler()

    def __exit__(self, *_raised: object) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0:
                while self._restore:
                    self._restore.pop()()
                if vars(torch).get("_dynamo") is self._marks:
                    del torch._dynamo

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._restore.append(partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _put_off_compiler(self) -> None:
        if not any(isinstance(finder, CompilerFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, CompilerFinder(self._marks))
        vars(torch)["_dynamo"] = self._marks
        self._replace(torch.compiler, "allow_in_graph", self._marks.allow_in_graph)
        self._replace(torch.compiler, "disable", self._marks.disable)

    def _import(
        self,
        plain: Callable[..., Any],
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        """Import as `builtins.__import__` does, but for what the module says."""
        importer = (globals or {}).get("__name__", "")
        if importer == "torch._compile" and name == _COMPILER and _COMPILER not in sys.modules:
            return torch
        if importer.partition(".")[0] != "transformers":
            return plain(name, globals, locals, fromlist, level)
        if fromlist and name in _LATER and name not in sys.modules and _LATER[name].issuperset(fromlist):
            laters = {each: Later(name, each, globals) for each in fromlist}
            if name == _TRACING:
                self._marks.laters += laters.values()
            return SimpleNamespace(**laters)
        module = plain(name, globals, locals, fromlist, level)
        if importer == "transformers" and name == "utils.import_utils":
            _remember_folders(module)
        return module


_IMPORTS = _Imports()


def lighter_imports() -> AbstractContextManager[None]:
    """Import less inside, see the module. Forward passes on the meta device do without the compiler, too."""
    return _IMPORTS


def _remember_folders(import_utils: Any) -> None:
    """Let transformers remember the contents of all its folders, not of the last 128."""
    look: Any = getattr(import_utils, "create_import_structure_from_path", None)
    if hasattr(look, "cache_info") and look.cache_info().maxsize is not None:
        import_utils.create_import_structure_from_path = lru_cache(maxsize=None)(look.__wrapped__)


def _import() -> None:
    missing = [name for name in _MODELING if name not in sys.modules]
    if missing:
        with lighter_imports():
            for name in missing:
                importlib.import_module(name)


_import()
