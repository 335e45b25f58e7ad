"""Trees of the heads' guesses, in the form of the authors' `medusa_choices`: paths of ranks from 0.

Example: ((0,), (0, 0), (1,)) is the first head's best token, the second head's best after it, and the first head's
second-best token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from slotline.registry.errors import ConfigError

Path = tuple[int, ...]

ACCURACY, NEXT_RANK, NEXT_HEAD = 0.6, 0.35, 0.85
"""Assumed where no choices are given: how often the first head's best token is right, and by which factor that falls
with each rank and with each head. A guess, not a measurement: it decides which nodes come first, no more."""


def likeliest(num_nodes: int, num_heads: int) -> list[Path]:
    """Return the `num_nodes` paths over `num_heads` heads that are likeliest under the assumed accuracies, in order."""
    chosen: list[Path] = []
    waiting: list[tuple[float, Path]] = [(-ACCURACY, (0,))]
    while waiting and len(chosen) < num_nodes:
        weight, path = heapq.heappop(waiting)
        chosen.append(path)
        heapq.heappush(waiting, (weight * NEXT_RANK, (*path[:-1], path[-1] + 1)))
        if len(path) < num_heads:
            heapq.heappush(waiting, (weight * ACCURACY * NEXT_HEAD ** len(path), (*path, 0)))
    return ordered(chosen)


def ordered(choices: Sequence[Sequence[int]]) -> list[Path]:
    """Return the paths with the likeliest chain first, each node after its parent, and likelier children first.

    Raises:
        ConfigError: if a path is empty, repeated, or lacks the path that it continues.
    """
    paths = [tuple(path) for path in choices]
    known = set(paths)
    for path in paths:
        if not path or any(not isinstance(rank, int) or rank < 0 for rank in path):
            raise ConfigError(
                f"drafter.medusa_tree: {list(path)} in choices is no path of ranks", fix="as in [[0], [0, 0]]"
            )
        if len(path) > 1 and path[:-1] not in known:
            raise ConfigError(
                f"drafter.medusa_tree: choices has {list(path)} and not {list(path[:-1])}",
                fix="name each path's beginning",
            )
    if len(known) < len(paths):
        raise ConfigError("drafter.medusa_tree: choices has a path twice", fix="name each path once")
    return sorted(paths, key=lambda path: (any(path), len(path), path))


def parents_of(paths: Sequence[Path]) -> list[int]:
    """Return the index of each path's parent, -1 for none."""
    place = {path: index for index, path in enumerate(paths)}
    return [place[path[:-1]] if len(path) > 1 else -1 for path in paths]
