"""Validators and notes of the options of connectors."""

from __future__ import annotations

from slotline.registry.config import size_in_bytes

LOSSY = "keys and values are kept in eight bits: texts may differ from those that are computed anew"
"""Note of a codec that rounds, in a plan."""


def check_size(_options: object, _field: object, value: str) -> None:
    """Refuse a text that is no size, with a ValueError."""
    size_in_bytes(value)


def positive(_options: object, _field: object, value: int) -> None:
    """Refuse a number below 1, with a ValueError."""
    if value < 1:
        raise ValueError(f"must be at least 1, not {value}")
