"""Fairness by tenant: as many tokens for each tenant that waits, by deficit round robin.

Each round gives every tenant with waiting requests a quantum of tokens, and a tenant's first request runs once the
tenant's quanta cover it (Shreedhar and Varghese, "Efficient fair queueing using deficit round robin", 1996). Here the
round in which that is so is computed from the tokens that the tenant was charged, so that no round is walked through.

A request is charged its prompt and the most outputs that it may get when it is admitted, and gets back what it did
not use when it ends (as Sheng et al., "Fairness in serving large language models", 2024, count both). A tenant that
begins to wait is charged as if it had used all rounds so far: idleness saves nothing.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Mapping

from attrs import define, field, frozen

from slotline.registry.config.validators import AtLeast
from slotline.registry.contracts.scheduler_policy import PolicyRequest, Rank, SchedulerPolicyContext
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

LONGEST = 256
"""Most characters of a tenant's name."""


def _positive(_instance: object, _attribute: object, value: Mapping[str, int]) -> None:
    for name, weight in value.items():
        if weight < 1:
            raise ValueError(f"tenant {name!r} has weight {weight}: use an integer >= 1")


@frozen(kw_only=True)
class FairOptions:
    """Options of `fair`.

    Attributes:
        quantum: tokens of a tenant in a round.
        weights: by tenant, the quanta that it gets in a round; 1 for others.
    """

    quantum: int = field(
        default=2048, validator=AtLeast(1), metadata={"doc": "tokens of each tenant with waiting requests in a round"}
    )
    weights: Mapping[str, int] = field(
        factory=dict,
        validator=_positive,
        metadata={"doc": "table from tenant to the quanta that it gets in a round; 1 for others"},
    )


@define(eq=False)
class Tenant:
    """Account of a tenant with unfinished requests.

    Attributes:
        quantum: its tokens of a round.
        charged: its tokens so far.
        waiting: numbers of its waiting requests, ascending.
        unfinished: number of its requests, the running ones included.
        place: order in which it began to wait, among those of the same round.
        version: number of changes, so that older entries of the heap are known.
    """

    quantum: int
    charged: int = 0
    waiting: list[int] = field(factory=list)
    unfinished: int = 0
    place: int = 0
    version: int = 0


class Fair:
    """See `slotline.registry.contracts.scheduler_policy.SchedulerPolicy`."""

    def __init__(self, context: SchedulerPolicyContext) -> None:
        options = context.options or FairOptions()
        self._quantum, self._weights = options.quantum, dict(options.weights)
        self._tenants: dict[str, Tenant] = {}
        self._owners: dict[int, str] = {}
        self._costs: dict[int, int] = {}
        self._paid: set[int] = set()
        self._heap: list[tuple[int, int, int, str]] = []  # round, place, version, tenant
        self._round = self._places = self._versions = 0

    def rank(self, request: PolicyRequest) -> Rank:
        """See `SchedulerPolicy.rank`."""
        return (request.number,)

    def validate(self, request: PolicyRequest) -> None:
        """See `SchedulerPolicy.validate`."""
        tenant = request.inputs.get("tenant", "")
        if not isinstance(tenant, str) or len(tenant) > LONGEST:
            raise RequestError(
                f"tenant={safe_repr(tenant)} is no name", fix=f"give a text of at most {LONGEST} characters"
            )

    def push(self, request: PolicyRequest) -> None:
        """See `SchedulerPolicy.push`."""
        name, number = request.inputs.get("tenant", ""), request.number
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(self._quantum * self._weights.get(name, 1))
        if number not in self._owners:
            self._owners[number], self._costs[number] = name, request.num_prompt_tokens + request.max_tokens
            tenant.unfinished += 1
            if not tenant.waiting:
                self._places += 1
                tenant.place = self._places
                tenant.charged = max(tenant.charged, (self._round - 1) * tenant.quantum)
        insort(tenant.waiting, number)
        self._changed(name, tenant)

    def head(self) -> int:
        """See `SchedulerPolicy.head`."""
        while True:
            _, _, version, name = self._heap[0]
            tenant = self._tenants.get(name)
            if tenant is not None and tenant.version == version and tenant.waiting:
                return tenant.waiting[0]
            heapq.heappop(self._heap)

    def remove(self, number: int) -> None:
        """See `SchedulerPolicy.remove`."""
        name = self._owners[number]
        tenant = self._tenants[name]
        tenant.waiting.remove(number)
        self._changed(name, tenant)

    def admitted(self, number: int) -> None:
        """See `SchedulerPolicy.admitted`."""
        if number in self._paid:
            return
        self._paid.add(number)
        name = self._owners[number]
        tenant = self._tenants[name]
        tenant.charged += self._costs[number]
        self._round = max(self._round, -(-tenant.charged // tenant.quantum))
        self._changed(name, tenant)

    def left(self, number: int, num_tokens: int) -> None:
        """See `SchedulerPolicy.left`."""
        name, cost = self._owners.pop(number), self._costs.pop(number)
        tenant = self._tenants[name]
        tenant.unfinished -= 1
        if number in self._paid:
            self._paid.remove(number)
            tenant.charged -= cost - num_tokens
        if tenant.unfinished:
            self._changed(name, tenant)
        else:
            del self._tenants[name]

    def restart(self) -> None:
        """See `SchedulerPolicy.restart`. All accounts begin anew."""
        for kept in (self._tenants, self._owners, self._costs, self._paid, self._heap):
            kept.clear()
        self._round = 0

    def _changed(self, name: str, tenant: Tenant) -> None:
        """Note the round in which a tenant's first request may run."""
        self._versions += 1
        tenant.version = self._versions
        if tenant.waiting:
            number = tenant.waiting[0]
            cost = 0 if number in self._paid else self._costs[number]
            place = -(-(tenant.charged + cost) // tenant.quantum), tenant.place
            heapq.heappush(self._heap, (*place, tenant.version, name))
