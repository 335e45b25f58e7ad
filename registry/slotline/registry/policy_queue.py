"""The waiting requests of a scheduler in the order of a policy, whose answers are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from attrs import field, frozen

from slotline.registry.contracts.scheduler_policy import (
    PolicyLoad,
    PolicyRequest,
    Rank,
    SchedulerPolicyCapabilities,
    StepBudget,
)
from slotline.registry.errors import IntegrityError, PluginError
from slotline.registry.ranked_policy import RankedPolicy


class Queued(Protocol):
    """What the queue reads and writes of a request; see `slotline.core.batch.request.Request`."""

    arrival: int
    prompt_token_ids: list[int]
    samples: bool
    priority: int
    row: int
    leader: Any
    view: PolicyRequest | None
    order: tuple[Rank, int]

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Further arguments of `Engine.add`."""

    @property
    def params(self) -> Any:
        """Sampling parameters."""

    @property
    def metrics(self) -> Any:
        """With `num_preemptions`."""


R = TypeVar("R", bound=Queued)


@frozen(kw_only=True)
class BuiltPolicy:
    """A policy that a factory made, by default first come, first served.

    Attributes:
        label: names the plugin and its source in messages.
    """

    policy: Any = field(factory=RankedPolicy)
    capabilities: SchedulerPolicyCapabilities = SchedulerPolicyCapabilities()
    label: str = "the scheduler policy"


class PolicyQueue(Generic[R]):
    """The requests that hold no blocks, new and preempted ones, and what the policy says of each step.

    Attributes:
        tokens, joining: most tokens and most new requests of the step that was begun last.
    """

    def __init__(self, built: BuiltPolicy, rows: Any, pool: Any, max_batched_tokens: int) -> None:
        """Make an empty queue.

        Args:
            rows: the scheduler's `RequestTable`. `pool` is its `BlockPool`. Both are read only.
        """
        self._policy, self._label, offer = built.policy, built.label, built.capabilities
        self._rows, self._pool, self._max_batched_tokens = rows, pool, max_batched_tokens
        self._inputs = offer.inputs
        self._admits, self._budgets, self._victims = map(_has, (offer.admits, offer.budgets, offer.victims))
        self._accounts, self._validates = map(_has, (offer.accounts, offer.validates))
        self._requests: dict[int, R] = {}
        self._told: set[int] = set()
        self._step = 0
        self.tokens, self.joining = max_batched_tokens, rows.max_requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def head(self) -> R:
        """The first request. There must be one.

        Raises:
            PluginError: if the policy names one that does not wait.
        """
        number = self._policy.head()
        if number not in self._requests:
            raise self._wrong(f"head gave {number!r:.60}, and no such request waits")
        return self._requests[number]

    def validate(self, request: R) -> None:
        """Have the policy look at a new request.

        Raises:
            RequestError: if it refuses it.
        """
        if self._validates:
            self._policy.validate(self._view(request))

    def push(self, request: R) -> None:
        """Queue a request, and write its standing.

        Raises:
            PluginError: if the policy gives no rank.
            IntegrityError: if another request with its number waits.
        """
        number = request.arrival
        if number in self._requests:
            raise IntegrityError(f"two requests that wait have number {number}")
        view = request.view = self._view(request)
        rank = self._policy.rank(view)
        if not isinstance(rank, tuple):
            raise self._wrong(f"rank gave {rank!r:.60}, expected a tuple of numbers")
        self._policy.push(view)
        request.order = rank, number
        self._requests[number] = request
        self._told.add(number)

    def remove(self, request: R, *, runs: bool = False) -> None:
        """Take a request out, if it waits. `runs` is True if it runs from now on."""
        number = request.arrival
        if self._requests.get(number) is request:
            del self._requests[number]
            self._policy.remove(number)
            if runs and self._accounts:
                self._policy.admitted(number)

    def left(self, request: R) -> None:
        """Tell the policy of a request that ends, if it heard of it. It still has its row, if it had one."""
        if request.view is not None and request.arrival in self._told:
            self._told.remove(request.arrival)
            if self._accounts:
                self._policy.left(request.arrival, self._known(request))

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()
        self._told.clear()
        self._policy.restart()

    def begin_step(self, num_running: int) -> None:
        """Begin a step, and have the policy limit it. It is not asked while nothing runs."""
        self._step += 1
        if self._budgets:
            self.tokens, self.joining = self._max_batched_tokens, self._rows.max_requests
            if num_running:
                self._limit(self._load(num_running))

    def _limit(self, load: PolicyLoad) -> None:
        budget = self._policy.budget(load)
        if not isinstance(budget, StepBudget):
            raise self._wrong(f"budget gave {budget!r:.60}, expected a StepBudget")
        if budget.tokens is not None:
            self.tokens = min(budget.tokens, self.tokens)
        if budget.requests is not None:
            self.joining = budget.requests

    def may_join(self, request: R, num_running: int) -> bool:
        """Return whether the policy lets a request join. It is not asked while nothing runs."""
        if not self._admits or not num_running:
            return True
        answer = self._policy.admits(request.view, self._load(num_running))
        if not isinstance(answer, bool):
            raise self._wrong(f"admits gave {answer!r:.60}, expected True or False")
        return answer

    def victim(self, running: Sequence[R]) -> int:
        """Return the place of the request to preempt among the running ones: the last, if the policy has no choice."""
        if not self._victims:
            return len(running) - 1
        number = self._policy.victim([request.view for request in running])
        for place, request in enumerate(running):
            if request.arrival == number:
                return place
        raise self._wrong(f"victim gave {number!r:.60}, and no such request runs")

    def _known(self, request: R) -> int:
        return len(request.prompt_token_ids) if request.row < 0 else int(self._rows.num_tokens[request.row])

    def _view(self, request: R) -> PolicyRequest:
        length = len(request.prompt_token_ids)
        room = self._rows.max_model_len - length
        given = (request.leader or request).inputs
        return PolicyRequest(
            number=request.arrival,
            num_prompt_tokens=length,
            num_tokens=self._known(request),
            max_tokens=min(request.params.max_tokens or room, room) if request.samples else 0,
            priority=request.priority,
            preemptions=request.metrics.num_preemptions,
            inputs={name: value for name in self._inputs if (value := given.get(name)) is not None},
        )

    def _load(self, num_running: int) -> PolicyLoad:
        return PolicyLoad(
            step=self._step,
            num_running=num_running,
            num_waiting=len(self._requests),
            num_free_rows=self._rows.num_free,
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks - 1,  # one holds nothing
            max_batched_tokens=self._max_batched_tokens,
        )

    def _wrong(self, text: str) -> PluginError:
        return PluginError(f"{self._label}: {text}", fix="tell the author of the plugin, or name another policy")


def _has(flag: Any) -> bool:
    return bool(flag.support)
