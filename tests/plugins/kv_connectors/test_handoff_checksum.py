"""The checksum by which a reader knows that a peer's block was not overwritten meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from slotline.plugins.kv_connectors.handoff.store import checksum_of


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1003])
def test_a_checksum_changes_with_every_byte(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    known = checksum_of(data)
    assert checksum_of(data.copy()) == known
    for place in {0, size // 2, size - 1}:
        other = data.copy()
        other[place] ^= 16
        assert checksum_of(other) != known
