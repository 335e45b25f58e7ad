"""Agreement of replicas on the captured shape of a forward pass, which must be the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.ranks.replicas.meetings import EAGER, Pass


class AgreedShapes:
    """Captured shapes, which all replicas have in the same order.

    Args:
        shapes: all of them.
    """

    def __init__(self, shapes: Sequence[GraphShape]) -> None:
        self._shapes = tuple(shapes)
        self._numbers = {shape: number for number, shape in enumerate(self._shapes)}

    def number_of(self, shape: GraphShape | None) -> int:
        """Return the number of a shape in messages."""
        return EAGER if shape is None else self._numbers[shape]

    def agreed(self, passes: Sequence[Pass]) -> GraphShape | None:
        """Return the shape that serves the steps of all replicas with tokens, None if they run eagerly.

        It is the smallest one that holds them. Steps of different kinds, as prompts and decodes, have none.
        """
        numbers = [each.shape for each in passes if each.tokens]
        if EAGER in numbers:
            return None
        wished = [self._shapes[number] for number in numbers]
        fitting = [shape for shape in self._shapes if all(_holds(shape, one) for one in wished)]
        return min(fitting, key=lambda shape: (shape.num_tokens, shape.variant), default=None)


def _holds(shape: GraphShape, other: GraphShape) -> bool:
    """Return True if a step of another shape can be padded to a shape."""
    same = (shape.query_len, shape.cascade) == (other.query_len, other.cascade)
    return same and shape.num_tokens >= other.num_tokens and shape.variant >= other.variant
