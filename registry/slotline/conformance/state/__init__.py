"""Checks of state plugins. Importing this package registers them."""

from slotline.conformance.state import (
    contract,
    graphs,
    history,
    numerics,
    pieces,
    refusals,
    rollback,
    sizes,
    slots,
    underdeclared,
)

__all__ = [
    "contract",
    "graphs",
    "history",
    "numerics",
    "pieces",
    "refusals",
    "rollback",
    "sizes",
    "slots",
    "underdeclared",
]
