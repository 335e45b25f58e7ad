"""Messages between ranks: pickled values, without what only this process can have."""

from __future__ import annotations

import io
import pickle
from typing import Any


def pickled(value: Any) -> bytes:
    """Return a value pickled for another process.

    Raises:
        Exception: of any kind, if another process could not read it, as functions of the program's main file.
    """
    stream = io.BytesIO()
    _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Refuse classes, functions and objects of the main file. The main file of another rank is ours."""
        owner = value if hasattr(value, "__qualname__") else type(value)
        if getattr(owner, "__module__", None) == "__main__":
            raise pickle.PicklingError(f"{owner.__qualname__} is defined in the program's main file")
        return NotImplemented
