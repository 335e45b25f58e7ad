"""Scheduler policies: one with all methods, for the suite's mutants, and one that only ranks."""

from __future__ import annotations

from collections.abc import Sequence

from slotline.registry.capability import Flag
from slotline.registry.contracts import (
    PolicyLoad,
    PolicyRequest,
    SchedulerPolicyCapabilities,
    SchedulerPolicyContext,
    StepBudget,
)
from slotline.registry.contracts.scheduler_policy import Rank
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.ranked_policy import RankedPolicy


class Careful:
    """First come, first served, in a list. Few join at a time, long ones only if blocks are free."""

    def __init__(self, context: SchedulerPolicyContext) -> None:
        self.order: list[int] = []
        self.tokens: dict[int, int] = {}
        self.most = context.max_batched_tokens

    def rank(self, request: PolicyRequest) -> Rank:
        return (request.number,)

    def push(self, request: PolicyRequest) -> None:
        self.order.append(request.number)
        self.order.sort()
        self.tokens.setdefault(request.number, request.num_prompt_tokens)

    def head(self) -> int:
        return self.order[0]

    def remove(self, number: int) -> None:
        self.order.remove(number)

    def restart(self) -> None:
        self.order.clear()
        self.tokens.clear()

    def admitted(self, number: int) -> None:
        assert number in self.tokens

    def left(self, number: int, num_tokens: int) -> None:
        assert self.tokens.pop(number) <= num_tokens

    def admits(self, request: PolicyRequest, load: PolicyLoad) -> bool:
        return load.num_free_blocks >= load.num_blocks // 4 or request.num_prompt_tokens < 16

    def budget(self, load: PolicyLoad) -> StepBudget:
        return StepBudget(tokens=max(1, self.most // 2), requests=2)

    def victim(self, running: Sequence[PolicyRequest]) -> int:
        return max(running, key=lambda one: (one.num_tokens, one.number)).number


class Aged(RankedPolicy):
    """Short ones first, aged by arrivals."""

    def __init__(self, context: SchedulerPolicyContext) -> None:
        super().__init__()

    def rank(self, request: PolicyRequest) -> Rank:
        return request.num_prompt_tokens + 8.5 * request.number, request.number


_YES = Flag(True)
offer = SchedulerPolicyCapabilities(admits=_YES, budgets=_YES, victims=_YES, accounts=_YES)

descriptor = Descriptor(
    kind=Kind.SCHEDULER_POLICY,
    name="careful",
    capabilities=offer,
    factory=Careful,
    summary="first come, first served, a few at a time",
)

aged = Descriptor(
    kind=Kind.SCHEDULER_POLICY,
    name="aged",
    capabilities=SchedulerPolicyCapabilities(),
    factory=Aged,
    summary="short prompts first, aged by arrivals",
)
