"""Checks of response parsers. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.response_parser import contract, texts

__all__ = ["contract", "texts"]
