"""What makes any start of a process lighter: imports and the parts of an engine."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from slotline.registry.collection import rare_collection
from slotline.registry.kept_code import kept_code


@contextmanager
def lean_start() -> Iterator[None]:
    """Collect garbage rarely inside, and compile methods of classes and regular expressions once for all starts."""
    with rare_collection(), kept_code():
        yield


def import_module(name: str) -> ModuleType:
    """Import a module and all that it needs, lightly unless it is there.

    What it makes lasts, so all objects count as old then, and no collection looks at them right away. Objects that the
    process has frozen stay frozen, and then one does.
    """
    if name in sys.modules:
        return sys.modules[name]
    with lean_start():
        module = importlib.import_module(name)
        if gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()
    return module
