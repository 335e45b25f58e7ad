"""Logits processors that ship with slotline: each a descriptor here and its implementation beside it."""
