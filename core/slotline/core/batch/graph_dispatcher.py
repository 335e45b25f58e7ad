"""Shapes that graphs are captured for, and the choice of a step's shape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from attrs import frozen

from slotline.core.batch.padding import padded_size
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.registry.negotiation import capture_sizes

AUTO_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Default token counts of uniform batches: fine-grained, since nearly every step is padded to one."""
AUTO_MIXED_SIZES = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Default token counts of mixed batches: few, since each may take a graph for every layer."""


@frozen
class GraphShape:
    """Shape that graphs are captured for.

    Attributes:
        num_tokens: tokens, padding included.
        query_len: of every request if all have the same, so that whole requests are padded. 0 for a mixed batch.
        num_requests: of a mixed batch whose attention is captured too, requests without query tokens included. 0 if
            attention runs between the graphs and takes any number.
        cascade: the kind of prefixes that are served apart (`StepPrefixes.kind`), 0 for none.
        variant: of the forward pass, as an extension numbers them. 0 for the plain one.
    """

    num_tokens: int
    query_len: int
    num_requests: int = 0
    cascade: int = 0
    variant: int = 0

    @property
    def padded_requests(self) -> int:
        """Requests that a batch of this shape is padded to, or 0 for any number."""
        return self.num_tokens // self.query_len if self.query_len else self.num_requests


class GraphDispatcher:
    """The shapes that a plan has captured, and the choice of a step's shape.

    Args:
        phases: the plan's phases and their states.
        sizes: token counts asked for, or ``auto``.
        query_len: of a uniform batch of requests that verify tokens, 1 + the most of these.
        max_requests, max_tokens: bounds on every batch.
        mixed_attention: whether a group's attention or states are inside the graphs of mixed batches, so that their
            requests are padded too.
        cascade: for a number of requests and of query tokens each: the kinds of prefixes to serve apart that a uniform
            batch of them may have.
        ranks: number whose multiples the token counts asked for are rounded up to: that of ranks that divide tokens.
        variants: for a query length, 0 for mixed batches, the variants that shapes are captured for, in ascending
            order. A shape of a larger variant serves steps of a smaller one too.
    """

    def __init__(
        self,
        phases: Mapping[str, str],
        sizes: Sequence[int] | str,
        *,
        query_len: int,
        max_requests: int,
        max_tokens: int,
        mixed_attention: bool = False,
        cascade: Callable[[int, int], Collection[int]] = lambda requests, query_len: (),
        variants: Callable[[int], Sequence[int]] = lambda query_len: (0,),
        ranks: int = 1,
    ) -> None:
        mixed_sizes = AUTO_MIXED_SIZES if isinstance(sizes, str) else sizes
        sizes = AUTO_SIZES if isinstance(sizes, str) else sizes
        sizes, mixed_sizes = ([-(-size // ranks) * ranks for size in each] for each in (sizes, mixed_sizes))
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._most_mixed = max_requests if mixed_attention else 0
        self._variants = variants
        for phase, length in (("decode", 1), ("verify", query_len)):
            if phases.get(phase, "none") != "none":
                self._sizes[length] = capture_sizes(sizes, length, max_requests)
        if phases.get("mixed", "none") != "none":
            self._sizes[0] = tuple(sorted({min(size, max_tokens) for size in mixed_sizes if size > 0}))
        self._cascades = dict[tuple[int, int], tuple[int, ...]]()  # by kind and query length
        for length in filter(None, self._sizes):
            # One for each power of two: padding costs less than twice as many captures.
            found = [(size, cascade(size // length, length)) for size in self._sizes[length]]
            found = [(size, kinds) for size, kinds in found if (size // length).bit_count() == 1]
            for kind in sorted({kind for _, kinds in found for kind in kinds}):
                self._cascades[kind, length] = tuple(size for size, kinds in found if kind in kinds)

    @property
    def largest_first(self) -> tuple[GraphShape, ...]:
        """Every shape in the order of capture."""
        every = [
            self._shape(size, length, cascade=cascade, variant=variant)
            for (cascade, length), sizes in ({(0, of): own for of, own in self._sizes.items()} | self._cascades).items()
            for size in sizes
            for variant in self._variants(length)
        ]
        return tuple(sorted(every, key=lambda s: (-s.num_tokens, s.query_len, s.cascade, s.variant)))

    def shape_for(self, schedule: SchedulerOutput, *, cascade: int = 0, variant: int = 0) -> GraphShape | None:
        """Return the captured shape that a step is padded to.

        Return None if the step runs eagerly.

        Args:
            cascade: the kind of prefixes that are served apart: no capture of another kind fits.
            variant: that its requests need.
        """
        if schedule.eager:
            return None
        tokens, requests = schedule.num_tokens, len(schedule.rows)
        length = tokens // requests
        if length not in self._sizes or (schedule.num_scheduled != length).any():
            length = 0
        sizes = (self._cascades.get((cascade, length)) if cascade else self._sizes.get(length)) or ()
        taken = next((captured for captured in self._variants(length) if captured >= variant), None)
        if not sizes or tokens > sizes[-1] or taken is None:
            return None
        return self._shape(padded_size(tokens, sizes), length, cascade=cascade, variant=taken)

    def _shape(self, num_tokens: int, query_len: int, *, cascade: int, variant: int) -> GraphShape:
        num_requests = 0 if query_len else min(num_tokens, self._most_mixed)
        return GraphShape(num_tokens, query_len, num_requests, cascade, variant)
