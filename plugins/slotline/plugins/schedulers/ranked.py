"""Policies whose order follows from what a request is when it begins to wait."""

from __future__ import annotations

from attrs import field, frozen

from slotline.registry.config.validators import AtLeast
from slotline.registry.contracts.scheduler_policy import PolicyRequest, Rank, SchedulerPolicyContext
from slotline.registry.ranked_policy import RankedPolicy


class FirstCome(RankedPolicy):
    """First come, first served. See `slotline.registry.contracts.scheduler_policy.SchedulerPolicy`."""

    def __init__(self, context: SchedulerPolicyContext) -> None:
        super().__init__()


class ByPriority(RankedPolicy):
    """The lowest priority number first, then by arrival."""

    def __init__(self, context: SchedulerPolicyContext) -> None:
        super().__init__()

    def rank(self, request: PolicyRequest) -> Rank:
        """See `SchedulerPolicy.rank`."""
        return request.priority, request.number


@frozen(kw_only=True)
class ShortestOptions:
    """Options of `shortest`.

    Attributes:
        aging: tokens that a request counts as longer for each request that arrived before it.
    """

    aging: int = field(
        default=64,
        validator=AtLeast(1),
        metadata={"doc": "tokens that a request counts as longer for each request that arrived before it"},
    )


class Shortest(RankedPolicy):
    """The request with the fewest tokens first, prompt and most outputs, aged by arrivals.

    A request of L tokens goes before all that arrive more than L / aging requests after it.
    """

    def __init__(self, context: SchedulerPolicyContext) -> None:
        super().__init__()
        self._aging = (context.options or ShortestOptions()).aging

    def rank(self, request: PolicyRequest) -> Rank:
        """See `SchedulerPolicy.rank`."""
        return request.num_prompt_tokens + request.max_tokens + self._aging * request.number, request.number
