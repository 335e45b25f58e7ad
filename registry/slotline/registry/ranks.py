"""Ranks: processes that run one engine together, and their groups."""

from __future__ import annotations

from attrs import frozen

from slotline.registry.errors import ConfigError

DIMENSIONS = ("data", "pipeline", "tensor")
"""In which a model and its requests are divided, the outermost first: the ranks of a tensor group are neighbours."""


@frozen(kw_only=True)
class RankLayout:
    """Numbers of ranks in each dimension.

    Attributes:
        data: groups that serve requests of their own.
        pipeline: parts of the layers.
        tensor: parts of each layer.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Return the number of all ranks."""
        return self.data * self.pipeline * self.tensor

    @property
    def replica_size(self) -> int:
        """Return the number of ranks that serve the same requests."""
        return self.pipeline * self.tensor

    def group(self, dimension: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from a rank in one dimension only, in order."""
        inner = 1
        for name in reversed(DIMENSIONS[DIMENSIONS.index(dimension) + 1 :]):
            inner *= getattr(self, name)
        count = getattr(self, dimension)
        first = rank - (rank // inner % count) * inner
        return tuple(first + index * inner for index in range(count))


@frozen(kw_only=True)
class Place:
    """One rank of an engine.

    Attributes:
        rank: its number, from 0.
        local_rank: its number among the ranks of its machine, which is the number of its device.
        layout: numbers of ranks in each dimension.
        local_size: number of ranks on its machine, None if all are.
    """

    rank: int = 0
    local_rank: int = 0
    layout: RankLayout = RankLayout()
    local_size: int | None = None

    @property
    def size(self) -> int:
        """Return the number of all ranks."""
        return self.layout.size

    def group(self, dimension: str) -> tuple[int, ...]:
        """Return the ranks of this rank's group in a dimension, in order."""
        return self.layout.group(dimension, self.rank)

    def index(self, dimension: str) -> int:
        """Return this rank's place in its group in a dimension."""
        return self.group(dimension).index(self.rank)


ALONE = Place()
"""A process that runs an engine by itself."""


def refuse_other_size(layout: RankLayout, size: int) -> None:
    """Refuse a launch with another number of processes than the configuration asks for.

    Raises:
        ConfigError: naming both numbers.
    """
    if size != layout.size:
        factors = " x ".join(f"{name} {getattr(layout, name)}" for name in DIMENSIONS if getattr(layout, name) > 1)
        raise ConfigError(
            f"{size} processes were started for {layout.size} ranks ({factors or 'one rank'})",
            fix=f"start {layout.size} processes, or correct [parallel]",
        )
