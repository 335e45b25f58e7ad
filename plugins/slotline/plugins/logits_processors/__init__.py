"""Logits processors that ship with slotline: each with a descriptor in `__init__` and its implementation next to it."""
