"""Damage of blocks in shared memory, for the conformance suite."""

from __future__ import annotations

from typing import cast

import numpy as np

from slotline.plugins.kv_connectors.shared.store import SharedStore
from slotline.plugins.kv_connectors.shared.table import FREE, VALID
from slotline.plugins.kv_connectors.stores.staged import StagedConnector
from slotline.registry.contracts import KVConnector


def damage(connector: KVConnector, how: str) -> bool:
    """Spoil all blocks of a store, see `DamageStore`."""
    assert isinstance(connector, StagedConnector)
    if not connector.flush(10.0):
        return False
    for table in cast("SharedStore", connector.store).tables:
        there = np.flatnonzero(table.entries["state"] == VALID)
        if how == "changed":
            table.slots[there, 77] ^= 1
        elif how == "swapped":
            table.slots[there] = table.slots[np.roll(there, 1)]
            for field in ("checksum", "length"):
                table.entries[field][there] = table.entries[field][np.roll(there, 1)]
        else:
            table.entries["state"][there] = FREE
    return True
