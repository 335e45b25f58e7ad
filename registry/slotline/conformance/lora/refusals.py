"""Refusal of a LoRA plugin's undeclared features."""

from __future__ import annotations

from slotline.registry.capability import GraphSupport
from slotline.registry.descriptor import Kind
from slotline.testing.refusal_checks import UNKNOWN, beyond, register_part_refusals

register_part_refusals(
    Kind.LORA,
    {
        "devices": lambda _: ("cpu", "cuda", UNKNOWN),
        "dtypes": lambda _: ("float32", "bfloat16", "float16", UNKNOWN),
        "target_modules": lambda _: ("q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens", UNKNOWN),
        "max_rank": lambda subject: beyond(subject, "max_rank"),
        "max_adapters": lambda subject: beyond(subject, "max_adapters"),
        "rslora": lambda _: (True,),
        "embeddings": lambda _: (True,),
        "extended": lambda _: (True,),
        "single": lambda _: (True,),
        "staged": lambda _: (True,),
        "divided": lambda _: (True,),
        "batch_invariant": lambda _: (True,),
        "dora": lambda _: (True,),
        "graphs": lambda _: tuple(GraphSupport),
    },
)
