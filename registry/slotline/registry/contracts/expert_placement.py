"""The expert placement contract, version 1 (provisional): which rank has which experts of a mixture.

Ranks that share a mixture by whole experts have slots, as many on each. Each slot holds a copy of one expert. The
tokens of an expert with several copies are divided evenly among them. A placement is good if no rank gets many more
tokens than another, since all ranks wait for the slowest.

A placement hangs on its arguments alone: every rank asks its own plugin, and all must get the same answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from slotline.registry.capability import Flag, Max
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import numpy as np


@frozen(kw_only=True, field_transformer=declared)
class ExpertPlacementCapabilities:
    """Capabilities that an expert placement declares.

    Attributes:
        max_ranks: most ranks that it divides experts among.
        redundant: it places copies of experts, where there are more slots than experts.
        priority: the placement with the highest one that fits is chosen.
    """

    max_ranks: Max = Max()
    redundant: Flag = Flag(False)
    priority: int = 0


@frozen(kw_only=True)
class ExpertPlacementContext:
    """Input of an expert placement's factory, once for each engine.

    Attributes:
        ranks: number of ranks that share each mixture.
        redundant: slots of a mixture beyond one for each expert. The ranks divide the number of all slots.
        options: the plugin's own table.
    """

    contract: int
    ranks: int
    redundant: int = 0
    options: Any = None


class ExpertPlacement(Protocol):
    """Product of an expert placement's factory."""

    def place(self, loads: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the expert of each slot [layers, experts + redundant] int64. It has every expert at least once.

        The slots of rank r are those from r * n on, if each rank has n. Their order within a rank does not matter. The
        most tokens of a rank are not more than if slot s held the expert s % experts.

        Args:
            loads: [layers, experts] float64, the tokens of each expert, or in proportion to them. All are at least 0,
                and all may be 0. They must not be changed.
        """
        ...
