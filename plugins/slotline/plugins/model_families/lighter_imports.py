"""transformers' modeling code, imported without packages that no model here needs. Import this before `transformers`.

Half of the time to import `transformers.modeling_utils` goes to SciPy's optimizers, for a loss of object detectors, to
torch's compiler, for decorators that only matter to it, to distributed tensors and SymPy, to Accelerate, to the client
of a model hub, and to a second look into each of transformers' 2,300 files. While the modules below are imported

- names that are imported and only used later (`later_names`) are objects that import them when they are used,
- decorators of `torch._dynamo` mark functions as torch's own would, as soon as that package is imported,
- torch's questions about symbolic sizes are answered for plain ones without SymPy (`plain_shapes`),
- what transformers' folder of models holds is kept from one start to the next (`folder_contents`).

All of it looks at what transformers asks for, so a release that asks for other names gets them as always. Imports of
other packages and of later moments are not touched.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path
from threading import Lock
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch

from slotline.plugins.model_families.folder_contents import keep_contents
from slotline.plugins.model_families.later_names import LATER, Later, complete_later
from slotline.plugins.model_families.plain_shapes import SHAPES, plain_shapes

_MODELING = ("transformers.modeling_utils", "transformers.generation.utils")
_COMPILER = "torch._dynamo"
_TENSORS = "torch.distributed.tensor"
_SYMBOLIC = frozenset({SHAPES, "sympy"})
_DISABLED = "__dynamo_disable"
"""Attribute in which `torch._compile` keeps what `torch._dynamo.disable` made of a function."""


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


def _remember_folders(import_utils: Any) -> None:
    keep_contents(import_utils, Path(import_utils.__file__).parents[1] / "models")


def _know_tensors(utils: Any) -> None:
    """Let a check for distributed tensors do without their module until it is imported: until then there is none."""
    check = utils.is_dtensor

    @wraps(check)
    def is_dtensor(value: object) -> bool:
        return _TENSORS in sys.modules and bool(check(value))

    utils.is_dtensor = is_dtensor


def _complete_styles(utils: Any) -> None:
    if (styles := getattr(utils, "ALL_PARALLEL_STYLES", None)) is not None:
        complete_later(styles)


_LOOKS: Mapping[str, Callable[[Any], None]] = MappingProxyType(
    {
        "transformers.distributed.parallel_utils": _complete_styles,
        "transformers.distributed.utils": _know_tensors,
        "transformers.utils.import_utils": _remember_folders,
    }
)
"""What is changed in modules of transformers once they are imported."""


class _Imports:
    """Lighter imports of the process, in place while any thread wants them."""

    def __init__(self) -> None:
        self._marks = CompilerMarks()
        self._lock = Lock()
        self._wanted = 0
        self._restore: list[Callable[[], None]] = []
        self._looks = dict(_LOOKS)

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
        if name in _SYMBOLIC and name not in sys.modules and locals is None and importer.partition(".")[0] == "torch":
            plain_ones = plain_shapes(fromlist) if fromlist else SimpleNamespace(Basic=Later(name, "Basic", {}))
            return plain_ones or plain(name, globals, locals, fromlist, level)
        if importer.partition(".")[0] != "transformers":
            return plain(name, globals, locals, fromlist, level)
        origin = resolve_name("." * level + name, globals["__package__"]) if level else name
        module = self._from(partial(plain, name, globals, locals, level=level), origin, fromlist or (), globals)
        if origin in self._looks and fromlist:
            self._looks.pop(origin)(module)
        return module

    def _from(self, plain: Callable[..., Any], origin: str, names: Sequence[str], holder: Any) -> Any:
        """Import names from a module, later what can wait."""
        late = LATER.get(origin, frozenset()).intersection(names).difference(vars(sys.modules.get(origin, Any)))
        if not late:
            return plain(fromlist=names)
        laters = {each: Later(origin, each, holder) for each in late}
        if origin.startswith(("torch.", "transformers.")):
            self._marks.laters += laters.values()
        others = tuple(each for each in names if each not in late)
        if not others:
            return SimpleNamespace(**laters)
        module = plain(fromlist=others)
        return SimpleNamespace(**{each: getattr(module, each) for each in others}, **laters)


_IMPORTS = _Imports()


def lighter_imports() -> AbstractContextManager[None]:
    """Import less inside, see the module. Forward passes on the meta device do without the compiler, too."""
    return _IMPORTS


def _import() -> None:
    missing = [name for name in _MODELING if name not in sys.modules]
    if missing:
        with lighter_imports():
            for name in missing:
                importlib.import_module(name)


_import()
