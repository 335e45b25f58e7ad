"""KV connectors: where blocks of the cache are kept that the pool has no room for."""
