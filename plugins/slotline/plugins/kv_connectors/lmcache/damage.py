"""Damage of blocks in a store of LMCache, for the conformance suite."""

from __future__ import annotations

from typing import cast

from slotline.plugins.kv_connectors.disk.file_reader import HEADER_BYTES
from slotline.plugins.kv_connectors.lmcache.store import LMCacheConnector, RemoteStore
from slotline.registry.contracts import KVConnector


def damage(connector: KVConnector, how: str) -> bool:
    """Spoil all blocks that a connector has saved, see `DamageStore`. Clients of LMCache remove no values."""
    assert isinstance(connector, LMCacheConnector)
    if how == "gone" or not connector.flush(10.0):
        return False
    store = cast("RemoteStore", connector.store)
    for group in {key.group for key in store.known}:
        keys = [key for key in store.known if key.group == group]
        values = store.values(keys)
        if how == "swapped":
            values = values[-1:] + values[:-1]
        else:
            for value in values:
                value[HEADER_BYTES + 9] ^= 1
        store.put_values(keys, values)
    return True
