"""The KV cache: blocks and who holds them, tables, prefixes, checkpoints of states, encoder outputs."""
