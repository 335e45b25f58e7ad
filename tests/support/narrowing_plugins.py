"""Shipped plugins whose probes leave less than their descriptors say, and refuse a request for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve
from tree_drafter import Tree

from slotline.backends import torch_sdpa
from slotline.plugins.kv_specs import full
from slotline.plugins.logits_processors import no_repeat_ngram
from slotline.plugins.lora import grouped
from slotline.registry.capability import Flag, Set
from slotline.registry.descriptor import Descriptor


def _left(declared: Descriptor[Any], **less: Any) -> Callable[[Any], Any]:
    return lambda _device: evolve(declared.capabilities, **less)


def _narrowing(shipped: Descriptor[Any], wide: dict[str, Any], narrow: dict[str, Any]) -> Descriptor[Any]:
    """The descriptor that declares `wide` and whose probe leaves `narrow` of it."""
    declared = evolve(shipped, name="narrow", capabilities=evolve(shipped.capabilities, **wide))
    return evolve(declared, probe=_left(declared, **narrow))


attention = _narrowing(
    torch_sdpa.descriptor,
    {"plan_once": Flag(True), "plain_writes": True},
    {
        "tree_mask": Flag(False),
        "plan_once": Flag(False),
        "bounded_lengths": False,
        "several_plans": False,
        "plain_writes": False,
    },
)
kv_spec = _narrowing(full.descriptor, {}, {"page_stride": Flag(False)})
drafter = _narrowing(evolve(Tree.descriptor, factory=Tree), {}, {"tree": Flag(False)})
lora = _narrowing(grouped.descriptor, {}, {"dtypes": Set({"bfloat16"})})
logits_processor = evolve(
    no_repeat_ngram.descriptor, name="narrow", probe=lambda device: f"no kernels for {device.type}"
)
