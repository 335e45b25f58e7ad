"""Checks of scheduler policies. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.scheduler_policy import contract, fuzz, hostile, queue

__all__ = ["contract", "fuzz", "hostile", "queue"]
