"""Checks of step extensions. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.extension import contract, engine, history, requests, steps

__all__ = ["contract", "engine", "history", "requests", "steps"]
