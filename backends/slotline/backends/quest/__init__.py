"""Descriptor of the `quest` attention backend: decodes read only the blocks of keys that can matter most.

The source is Quest (Tang et al. 2024, arXiv 2406.10774).
"""

from __future__ import annotations

from attrs import field, frozen

from slotline.registry.capability import Choice, Flag, Set
from slotline.registry.config.validators import AtLeast
from slotline.registry.contracts.attention import AttentionCapabilities
from slotline.registry.contracts.cache_tensors import KEY_BOUNDS
from slotline.registry.descriptor import Descriptor, Kind

FLOATS = ("float32", "bfloat16", "float16")


@frozen(kw_only=True)
class QuestOptions:
    """`[backend.quest]`."""

    top_blocks: int = field(
        default=64,
        validator=AtLeast(2),
        metadata={
            "doc": "kernel blocks that a token of a decode reads for each KV head, the first and the newest among "
            "them; all blocks of a request that has no more"
        },
    )


descriptor = Descriptor(
    kind=Kind.ATTENTION,
    name="quest",
    capabilities=AttentionCapabilities(
        devices=Set(("cpu",)),
        dtypes=Set((dtype, dtype) for dtype in FLOATS),
        different_value_head=Flag(True),
        layouts=Choice(("NHD", "HND")),
        soft_cap=Flag(True),
        any_strides=True,
        sinks=Flag(True),
        cache_formats=Set((KEY_BOUNDS,)),
        exact=Flag(False, "decodes read the `top_blocks` blocks of each KV head with the largest possible scores"),
        priority=5,
        priority_reason="approximates: for those who ask for it",
    ),
    factory="slotline.backends.quest.backend:QuestBackend",
    options=QuestOptions,
    summary="decodes read the blocks whose bounds allow the largest scores (Quest); an approximation",
)
