"""Numbers of NumPy as Python's own, so that both count as numbers wherever one is asked for. Imports no NumPy."""

from __future__ import annotations

from typing import Any


def plain_number(value: Any) -> Any:
    """Return a scalar of NumPy as a Python object, anything else as it is."""
    kind = type(value)
    return (
        value.item()
        if kind.__module__ == "numpy" and any(base.__name__ == "generic" for base in kind.__mro__)
        else value
    )


def plain_list(value: Any) -> Any:
    """Return a scalar or array of NumPy as Python objects, anything else as it is."""
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value
