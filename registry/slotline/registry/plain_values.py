"""Conversion of NumPy numbers to Python numbers, so that both are accepted as numbers. Imports no NumPy."""

from __future__ import annotations

from typing import Any


def plain_number(value: Any) -> Any:
    """Return a NumPy scalar as a Python object, other values unchanged."""
    kind = type(value)
    return (
        value.item()
        if kind.__module__ == "numpy" and any(base.__name__ == "generic" for base in kind.__mro__)
        else value
    )


def plain_list(value: Any) -> Any:
    """Return a NumPy scalar or array as Python objects, other values unchanged."""
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value
