"""Numbers of adapters in a step, which are the variants of captured graphs."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from slotline.registry.capability import GraphSupport
from slotline.registry.descriptor import Descriptor


class AdapterUse(IntEnum):
    """Adapters of a step. A larger value serves steps of a smaller one too."""

    NONE = 0
    ONE = 1
    MANY = 2


def captured_for(
    descriptor: Descriptor[Any], query_len: int, *, specialize: bool, single: bool = False
) -> tuple[AdapterUse, ...]:
    """Return the uses of adapters for which batches of a query length are captured, in ascending order.

    A query length of 0 means mixed batches. They have no graphs of their own for one adapter: their tokens are many,
    and each shape may take a graph for every layer.

    """
    needed = {0: GraphSupport.ALWAYS, 1: GraphSupport.SINGLE_TOKEN}.get(query_len, GraphSupport.UNIFORM)
    if descriptor.capabilities.graphs.refusal(needed) is not None:
        return (AdapterUse.NONE,)
    if not (specialize and descriptor.capabilities.graph_key):
        return (AdapterUse.MANY,)
    return tuple(use for use in AdapterUse if use != AdapterUse.ONE or (single and query_len > 0))
