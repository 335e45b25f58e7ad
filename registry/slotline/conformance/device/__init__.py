"""Checks of devices. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.device import (
    buffers,
    choices,
    contract,
    copies,
    engine,
    graphs,
    history,
    memory,
    names,
    operations,
    repeats,
    sampling,
)

__all__ = [
    "buffers",
    "choices",
    "contract",
    "copies",
    "engine",
    "graphs",
    "history",
    "memory",
    "names",
    "operations",
    "repeats",
    "sampling",
]
