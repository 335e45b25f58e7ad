"""The checks of the conformance suite without those at large sizes."""

from __future__ import annotations

from slotline.testing import Check


def in_small(item: Check) -> bool:
    """Leave out large sizes, which take as long as all the rest: the suite's own tests have them."""
    return item.profile != "sizes"
