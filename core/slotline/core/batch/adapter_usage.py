"""Numbers of adapters in a step, which graphs are captured and products are made for."""

from __future__ import annotations

from enum import IntEnum


class AdapterUse(IntEnum):
    """Adapters of a step. A larger value serves steps of a smaller one too."""

    NONE = 0
    ONE = 1
    MANY = 2
