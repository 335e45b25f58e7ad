"""Refusal of a logits processor's undeclared features."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.refusal_checks import UNKNOWN, register_part_refusals

register_part_refusals(
    Kind.LOGITS_PROCESSOR,
    {
        "devices": lambda _: ("cpu", "cuda", UNKNOWN),
        "speculation": lambda _: (True,),
    },
)
