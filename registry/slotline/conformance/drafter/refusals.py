"""Refusal of a drafter's undeclared features."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.refusal_checks import UNKNOWN, beyond, register_part_refusals

register_part_refusals(
    Kind.DRAFTER,
    {
        "devices": lambda _: ("cpu", "cuda", UNKNOWN),
        "max_tokens": lambda subject: beyond(subject, "max_tokens"),
        "tree": lambda _: (True,),
        "request_trees": lambda _: (True,),
        "probabilities": lambda _: (True,),
    },
)
