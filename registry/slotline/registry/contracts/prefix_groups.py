"""Prefixes that groups of a step's requests share, each read once for its group.

An attention backend that declares `AttentionCapabilities.cascade_prefixes` as ``groups`` or ``levels`` may get a batch
with `AttentionBatch.prefix_groups`. Its requests are in groups that share *segments*: a segment is a range of key
positions that lies in the same kernel blocks for all requests of its group. Then

* a request's segments follow each other from position 0 on: the first one begins there, each next one where the one
  before ends. Under ``groups`` a request has one segment at most, under ``levels`` up to `PrefixGroups.levels`, as a
  system prompt that all share and then a document that some of them share. Groups of a level are disjoint, and each is
  within one group of the level before.
* Bounds of segments are multiples of the kernel block size, and no more than the number of tokens that each request of
  the group had in the cache before this step. So every query of the group sees the whole segment: it is read without a
  mask. A request's other keys, from `PrefixGroups.own` on, are its own part; there is one at least.
* The result is the same as without: the parts of a query are merged by LSE, and a sink counts once.
* Such a batch has a `common_prefix_len` of 0. Layers with a window or chunks never get one.
* It is set only if `use_cascade` of every backend concerned returned True for each segment, asked with its own length
  and the lengths of its group's requests.
* If graphs are declared too, batches with groups are shapes of their own. All tensors have fixed sizes and addresses
  there: as many segments as the shape has room for, those at the end without query tokens, so that `starts` repeats its
  last number. The capture uses one segment of all requests at each level, of the longest sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

MAX_LEVELS, MAX_SEGMENTS = 2, 32
"""Most segments of a request, and of a batch."""


@frozen(kw_only=True, eq=False)
class PrefixGroups:
    """Segments of a batch, on the device and on the host. See the module's text.

    Attributes:
        levels: most segments of a request in this batch; in a captured shape those that there is room for.
        segments: [n, 4] int32 on the device: the request whose block table is read, the first key, the key after the
            last one, and the level from 0. Those of a level follow each other, first those of level 0.
        starts: [n + 1] int32 on the device, the places in `tokens` where each segment's begin.
        tokens: [m] int32 on the device, the query tokens of each segment. There may be more than ``starts[n]``.
        own: [num_requests] int32 on the device, the first key of a request that is in none of its segments.
        depths: [num_tokens] int32 on the device, the segments of each query token's request.
        segments_cpu, starts_cpu, tokens_cpu, own_cpu, depths_cpu: the same on the host.
    """

    levels: int
    segments: torch.Tensor
    starts: torch.Tensor
    tokens: torch.Tensor
    own: torch.Tensor
    depths: torch.Tensor
    segments_cpu: npt.NDArray[np.int32]
    starts_cpu: npt.NDArray[np.int32]
    tokens_cpu: npt.NDArray[np.int32]
    own_cpu: npt.NDArray[np.int32]
    depths_cpu: npt.NDArray[np.int32]


def most_packed(num_requests: int, num_tokens: int) -> int:
    """Return the most numbers of `StepPrefixes.packed` for a cache group, of so many requests and tokens."""
    return 5 * MAX_SEGMENTS + num_requests + (MAX_LEVELS + 1) * num_tokens + 16  # each of five arrays is aligned


class StepPrefixes(Protocol):
    """Prefixes of a step to serve apart, as their finder describes them to the core.

    Attributes:
        kind: 1 for one prefix of all requests, 2 for those of groups. Steps of different kinds replay different graphs.
    """

    kind: int

    def padded(self, num_requests: int, num_tokens: int) -> StepPrefixes:
        """Return the same for a captured shape of this size."""
        ...

    def packed(self) -> npt.NDArray[np.int32]:
        """Return the numbers that the device needs, [n] int32, n the same for each step of a captured shape."""
        ...

    def fields(self, group: int, packed: torch.Tensor) -> Mapping[str, Any]:
        """Return what `AttentionBatch` says of them in a cache group, from the numbers on the device."""
        ...


class PrefixFinder(Protocol):
    """Finder of the prefixes that a step's requests share."""

    def of_step(self, schedule: Any) -> StepPrefixes | None:
        """Return the prefixes to serve apart in a step (`SchedulerOutput`), None for none.

        The same object means that nothing about them has changed since the step before.
        """
        ...

    def longest(self, query_lens: npt.NDArray[np.int64], seq_len: int, kind: int) -> StepPrefixes | None:
        """Return the prefixes of a capture, None if the backends decline such batches.

        Args:
            query_lens: [n] int64, tokens of each request that the step computes.
            seq_len: tokens of each after the step.
            kind: see `StepPrefixes`.
        """
        ...
