"""Checks of KV connectors. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.kv_connector import blocks, contract, engine, files, fuzz, hostile, layers, requests

__all__ = ["blocks", "contract", "engine", "files", "fuzz", "hostile", "layers", "requests"]
