"""Checks of communicators. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.communicator import contract, engine, failures, graphs, hostile, numerics, stateful

__all__ = ["contract", "engine", "failures", "graphs", "hostile", "numerics", "stateful"]
