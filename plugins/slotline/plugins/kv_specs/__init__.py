"""Cache specs: what each kind of KV cache needs from the block pool."""
