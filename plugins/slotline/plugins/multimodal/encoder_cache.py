"""Encoder cache: tracks which items are encoded, which requests hold them, and which are dropped.

This is the scheduler's part. It counts and holds no tensors. `EncoderRunner` keeps the tensors and drops those that a
step names. Entries are found by the hash of their item, so that requests share them. A request holds an entry from
the step that first reaches its span until the step after the one that computed the span's end. An entry without holders
stays until its room is needed. The least recently released entry is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from attrs import define

from slotline.core.batch.request import Request, Status
from slotline.plugins.multimodal.features import Feature, features_of
from slotline.registry.errors import IntegrityError


@define(eq=False)
class _Entry:
    """Embeddings on the device or about to be encoded: their number, and the number of features that hold them."""

    size: int
    holders: int = 0


class EncoderCache:
    """Reference counts and capacity, in embeddings.

    Attributes:
        capacity: embeddings kept at a time.
        max_tokens_per_step: embeddings made in one step.
    """

    def __init__(self, capacity: int, max_tokens_per_step: int) -> None:
        self.capacity = capacity
        self.max_tokens_per_step = max_tokens_per_step
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._held: dict[Request, dict[int, Feature]] = {}  # features by their index in the request
        self._new: dict[str, Feature] = {}  # to encode in the step that is being scheduled
        self._dropped: list[str] = []

    @property
    def hashes(self) -> frozenset[str]:
        """Return the hashes of items whose embeddings are kept."""
        return frozenset(self._entries)

    @property
    def num_used(self) -> int:
        """Return the number of embeddings kept, including those without holders."""
        return sum(entry.size for entry in self._entries.values())

    def reach(self, request: Request, num_computed: int, count: int) -> int:
        """Return how many of the `count` tokens after the computed ones a step can compute.

        The tokens end before the first item that cannot be encoded in the step. Takes the entries that these
        tokens need and releases those that the request has passed.
        """
        self._pass(request, num_computed)
        for index, feature in enumerate(features_of(request)):
            if feature.start >= num_computed + count:
                break
            if feature.end > num_computed and not self._hold(request, index, feature):
                return max(0, feature.start - num_computed)
        return count

    def release(self, request: Request) -> None:
        """Release all entries that a request holds, because it ended or lost its blocks."""
        for feature in self._held.pop(request, {}).values():
            self._let_go(feature)

    def take(self) -> tuple[tuple[Feature, ...], tuple[str, ...]]:
        """Return the features that the step encodes, and the hashes to drop before that."""
        taken = tuple(self._new.values()), tuple(self._dropped)
        self._new, self._dropped = {}, []
        return taken

    def forget(self, mm_hashes: Iterable[str]) -> None:
        """Remove entries without holders and without embeddings, so that no step needs to drop them."""
        for mm_hash in mm_hashes:
            del self._idle[mm_hash], self._entries[mm_hash]

    def reset(self) -> None:
        """Forget all entries without holders."""
        self.forget(list(self._idle))

    def restore(self) -> None:
        """Forget all entries, including those that requests hold, whatever was being scheduled."""
        for kept in (self._entries, self._idle, self._held, self._new, self._dropped):
            kept.clear()

    def check(self) -> None:
        """Raise IntegrityError unless entries, holders and requests agree."""
        held: dict[str, int] = {}
        for request, features in self._held.items():
            if request.status is not Status.RUNNING:
                raise IntegrityError(
                    f"request {request.request_id!r} is {request.status.value} and holds {len(features)} "
                    "encoder outputs"
                )
            for feature in features.values():
                held[feature.mm_hash] = held.get(feature.mm_hash, 0) + 1
        counts = {mm_hash: entry.holders for mm_hash, entry in self._entries.items()}
        wrong = [h for h in counts.keys() | held.keys() if counts.get(h) != held.get(h, 0)]
        if wrong:
            raise IntegrityError(
                f"encoder output {wrong[0][:12]} is held {held.get(wrong[0], 0)} times and counts "
                f"{counts.get(wrong[0])}"
            )
        if set(self._idle) != {mm_hash for mm_hash, count in counts.items() if count == 0}:
            raise IntegrityError("the idle encoder outputs are not those that nobody holds")
        if self.num_used > self.capacity:
            raise IntegrityError(f"{self.num_used} embeddings are kept; encoder cache holds {self.capacity}")

    def check_request(self, request: Request, num_computed: int) -> None:
        """Raise IntegrityError unless a running request holds each item whose span it has partly computed."""
        held = self._held.get(request, {})
        for index, feature in enumerate(features_of(request)):
            if feature.start < num_computed < feature.end and index not in held:
                raise IntegrityError(
                    f"request {request.request_id!r} computed {num_computed} tokens and does not hold item {index}, "
                    f"whose span ends at {feature.end}"
                )

    def _hold(self, request: Request, index: int, feature: Feature) -> bool:
        if index in self._held.get(request, {}):
            return True
        entry = self._entries.get(feature.mm_hash) or self._add(feature)
        if entry is None:
            return False
        entry.holders += 1
        self._idle.pop(feature.mm_hash, None)
        self._held.setdefault(request, {})[index] = feature
        return True

    def _add(self, feature: Feature) -> _Entry | None:
        """Add an entry for an item that this step encodes. None if the step or the cache has no room for it."""
        idle = sum(self._entries[mm_hash].size for mm_hash in self._idle)
        in_step = sum(new.size for new in self._new.values())
        if in_step + feature.size > self.max_tokens_per_step or self.num_used - idle + feature.size > self.capacity:
            return None
        while self.num_used + feature.size > self.capacity:
            oldest, _ = self._idle.popitem(last=False)
            del self._entries[oldest]
            self._dropped.append(oldest)
        self._new[feature.mm_hash] = feature
        return self._entries.setdefault(feature.mm_hash, _Entry(feature.size))

    def _pass(self, request: Request, num_computed: int) -> None:
        held = self._held.get(request, {})
        for index in [i for i, feature in held.items() if feature.end <= num_computed]:
            self._let_go(held.pop(index))
        if not held:
            self._held.pop(request, None)

    def _let_go(self, feature: Feature) -> None:
        entry = self._entries[feature.mm_hash]
        entry.holders -= 1
        if entry.holders == 0 and feature.mm_hash in self._new:  # no request waits for it any more
            del self._new[feature.mm_hash], self._entries[feature.mm_hash]
        elif entry.holders == 0:
            self._idle[feature.mm_hash] = None
