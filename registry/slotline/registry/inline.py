"""Inline plugins: ``./mine.py:Mine``, a class or descriptor in a file named by the configuration."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from slotline.registry.errors import PluginLoadError
from slotline.registry.loading import load_fix, one_line, to_descriptor
from slotline.registry.records import PluginRecord, PluginState


def inline_records(targets: Iterable[str | Path]) -> list[PluginRecord]:
    """Load each inline plugin. A failure is an error, because the configuration names the plugin.

    Raises:
        PluginLoadError: naming the file, with the cause chained.
    """
    modules: dict[Path, ModuleType] = {}
    return [_inline(os.fspath(target), modules) for target in targets]


def _inline(target: str, modules: dict[Path, ModuleType]) -> PluginRecord:
    what = f"inline plugin {target!r}"
    name, _, attribute = target.rpartition(":")
    if not name or not attribute.isidentifier():
        raise PluginLoadError(f"{what} is not of the form 'file.py:attribute'")
    path = Path(name).resolve()
    module = modules[path] = modules.get(path) or _execute(path, what)
    if not hasattr(module, attribute):
        offered = ", ".join(key for key in vars(module) if not key.startswith("_"))
        raise PluginLoadError(f"{what}: {path} has no attribute {attribute!r}", fix=f"it has: {offered}")
    descriptor = to_descriptor(getattr(module, attribute), what)
    return PluginRecord(
        kind=descriptor.kind,
        name=descriptor.name,
        value=target,
        path=str(path),
        state=PluginState.LOADED,
        descriptor=descriptor,
        inline=True,
    )


def _execute(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise PluginLoadError(f"{what}: there is no file {path}", fix="paths count from the file that names them")
    name = f"slotline_inline_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginLoadError(f"{what}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before the module runs, because attrs and pickle look up the module of a class
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PluginLoadError(
            f"{what}: {path} fails while it is imported: {one_line(error)}", fix=load_fix(error)
        ) from error
    return module
