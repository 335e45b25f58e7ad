"""What a step's batches are told of prefixes that are served apart, packed for one upload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen

from slotline.registry.contracts.prefix_groups import MAX_LEVELS, MAX_SEGMENTS, PrefixGroups

Int = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


ALIGNED = 4
"""Numbers whose multiples arrays begin at, see `_aligned`."""


class Segment(NamedTuple):
    """Keys `first` .. `end` - 1, which lie in the same blocks for `requests` [n] of a batch, at a level from 0."""

    requests: Int
    first: int
    end: int
    level: int


@frozen(eq=False)
class CommonPrefixes:
    """A prefix of all requests. Implements `StepPrefixes`.

    Attributes:
        lengths: its tokens by cache group, 0 for none.
    """

    lengths: tuple[int, ...]
    kind: int = 1

    def padded(self, num_requests: int, num_tokens: int) -> CommonPrefixes:
        """See `StepPrefixes.padded`."""
        return self

    def packed(self) -> Int32:
        """See `StepPrefixes.packed`."""
        return np.asarray(self.lengths, np.int32)

    def fields(self, group: int, packed: torch.Tensor) -> Mapping[str, Any]:
        """See `StepPrefixes.fields`."""
        if not self.lengths[group]:
            return {}
        return {"common_prefix_len": self.lengths[group], "common_prefix": packed[group : group + 1]}


@frozen(eq=False, kw_only=True)
class GroupedPrefixes:
    """Prefixes of groups of requests. Implements `StepPrefixes`.

    Attributes:
        segments: by cache group, none if no requests of this step share any, None for a cache group without cascade.
        starts: [num_requests + 1] int64, the first query token of each request.
        num_requests, num_tokens: of the batch, padding included.
        max_levels: that the backends know.
        room: segments and levels of the arrays, None for as many as there are.
    """

    segments: tuple[Sequence[Segment] | None, ...]
    starts: Int
    num_requests: int
    num_tokens: int
    max_levels: int = MAX_LEVELS
    room: tuple[int, int] | None = None
    kind: int = 2

    def padded(self, num_requests: int, num_tokens: int) -> GroupedPrefixes:
        """See `StepPrefixes.padded`."""
        room = MAX_SEGMENTS, self.max_levels
        return evolve(self, num_requests=num_requests, num_tokens=num_tokens, room=room)

    def packed(self) -> Int32:
        """See `StepPrefixes.packed`."""
        parts = [part.reshape(-1) for one in self._arrays if one is not None for part in one.arrays]
        return np.concatenate([np.pad(part, (0, _aligned(part.size) - part.size)) for part in parts])

    def fields(self, group: int, packed: torch.Tensor) -> Mapping[str, Any]:
        """See `StepPrefixes.fields`."""
        made, at = self._arrays, 0
        for one in made[:group]:
            at += 0 if one is None else sum(_aligned(part.size) for part in one.arrays)
        if (own := made[group]) is None:
            return {}
        fields: dict[str, Any] = {"levels": own.levels}
        for name, part in zip(_NAMES, own.arrays, strict=True):
            fields[name] = packed[at : at + part.size].view(*part.shape)
            fields[f"{name}_cpu"] = part
            at += _aligned(part.size)
        return {"prefix_groups": PrefixGroups(**fields)}

    @cached_property
    def _arrays(self) -> list[_Arrays | None]:
        return [self._of_group(own) if own or (own is not None and self.room) else None for own in self.segments]

    def _of_group(self, own: Sequence[Segment]) -> _Arrays:
        """Lay out the segments of a cache group."""
        room, levels = self.room or (len(own), 1 + max(segment.level for segment in own))
        segments = np.zeros((room, 4), np.int32)
        starts = np.zeros(room + 1, np.int32)
        tokens = np.zeros(levels * self.num_tokens, np.int32)
        first_keys, depths = np.zeros(self.num_requests, np.int32), np.zeros(self.num_tokens, np.int32)
        at = 0
        for place, (requests, first, end, level) in enumerate(own):
            segments[place] = requests[0], first, end, level
            first_keys[requests] = end  # the segments of a level come after those of the level before
            for request in requests.tolist():
                begin, stop = int(self.starts[request]), int(self.starts[request + 1])
                tokens[at : at + stop - begin] = np.arange(begin, stop)
                depths[begin:stop] = level + 1
                at += stop - begin
            starts[place + 1] = at
        starts[len(own) + 1 :] = at
        return _Arrays(levels, (segments, starts, tokens, first_keys, depths))


def _aligned(size: int) -> int:
    """Return so many numbers and some more, so that what comes behind begins at a multiple of 16 bytes.

    Kernels may differ by a tensor's alignment. An odd one would be compiled while requests wait.
    """
    return -(-size // ALIGNED) * ALIGNED


class _Arrays(NamedTuple):
    """Arrays of a cache group, in the order of `_NAMES`."""

    levels: int
    arrays: tuple[Int32, ...]


_NAMES = ("segments", "starts", "tokens", "own", "depths")
