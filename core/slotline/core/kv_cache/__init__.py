"""KV cache: block pool, block tables, prefix cache and sizing."""
