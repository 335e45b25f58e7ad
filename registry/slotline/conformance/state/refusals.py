"""Refusal of a state backend's undeclared features."""

from __future__ import annotations

from itertools import product

from slotline.registry.capability import GraphSupport
from slotline.registry.contracts.state import STATE_KINDS
from slotline.registry.descriptor import Kind
from slotline.testing.refusal_checks import UNKNOWN, beyond, register_part_refusals

FLOATS = ("float32", "bfloat16", "float16")

register_part_refusals(
    Kind.STATE,
    {
        "devices": lambda _: ("cpu", "cuda", UNKNOWN),
        "state_kinds": lambda _: (*STATE_KINDS, UNKNOWN),
        "dtypes": lambda _: tuple(product(FLOATS, FLOATS)),
        "query_len": lambda subject: beyond(subject, "query_len"),
        "rollback": lambda _: (True,),
        "checkpoints": lambda _: (True,),
        "graphs": lambda _: tuple(GraphSupport),
    },
)
