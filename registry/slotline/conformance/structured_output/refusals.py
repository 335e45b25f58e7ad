"""Refusal of a structured-output plugin's undeclared features."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.refusal_checks import UNKNOWN, register_part_refusals

register_part_refusals(Kind.STRUCTURED_OUTPUT, {"devices": lambda _: ("cpu", "cuda", UNKNOWN)})
