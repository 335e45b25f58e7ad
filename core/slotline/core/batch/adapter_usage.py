"""How many adapters a step has: what graphs are captured for, and what products are made for."""

from __future__ import annotations

from enum import IntEnum


class AdapterUse(IntEnum):
    """Adapters of a step; what can run more of them can run fewer."""

    NONE = 0
    ONE = 1
    MANY = 2
