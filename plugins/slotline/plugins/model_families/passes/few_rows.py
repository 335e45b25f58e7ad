"""Products of few rows on a CPU: what their kernels have in common, and the kernels once they are needed.

They are compiled by numba, whose import takes longer than all of a GPU's passes, which do without.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

MOST_ROWS = 16
"""Largest number of rows that the kernels take."""
LANES = 16
"""Input features are a multiple of it."""
NOTHING, ADD, MULTIPLY, SWISH = range(4)
"""What is done last: nothing, adding or multiplying by another tensor, or the activation of that name."""


@cache
def dense_kernels() -> ModuleType:
    """Import and return the kernels for weights as they lie."""
    from slotline.plugins.model_families.passes import dense_kernels

    return dense_kernels


@cache
def panel_kernels() -> ModuleType:
    """Import and return the kernels for weights in oneDNN's layout."""
    from slotline.plugins.model_families.passes import panel_kernels

    return panel_kernels
