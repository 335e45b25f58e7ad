"""Correct attention backend, written for clarity. The descriptor does not import torch."""

from __future__ import annotations

from slotline.registry.capability import Align, Choice, Flag, Limit, Range, Set
from slotline.registry.contracts.attention import AttentionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.ATTENTION,
    name="reference_eager",
    summary="the textbook formula, request by request",
    capabilities=AttentionCapabilities(
        devices=Set(None),
        dtypes=Set(
            (
                ("float32", "float32"),
                ("bfloat16", "bfloat16"),
                ("float16", "float16"),
                ("float32", "bfloat16"),
                ("bfloat16", "float8_e4m3fn"),
            )
        ),
        head_sizes=Range(),
        different_value_head=Flag(True),
        group_sizes=Range(),
        kernel_block_sizes=Align(),
        layouts=Choice(("NHD", "HND")),
        attention_types=Set(("decoder", "encoder_only", "cross")),
        sliding_window=Flag(True),
        encoder_window=Flag(True),
        keys_ahead=Flag(True),
        soft_cap=Flag(True),
        sinks=Flag(True),
        mla=Flag(True),
        tree_mask=Flag(True),
        request_trees=Flag(True),
        kv_scales=Flag(True),
        bounded_lengths=True,
        lse=Flag(True),
        scores=Flag(True),
        limits=(
            Limit(
                when="sliding_window",
                capability="attention_types",
                offer=Set(("decoder", "encoder_only")),
                note="the contract defines no windows for cross-attention",
            ),
        ),
    ),
    factory="slotline.testing.reference.attention.backend:EagerAttention",
)
