"""The scheduler policy contract, version 1 (provisional): who runs next, who gives way, and how much a step takes.

The core knows which requests wait and which run, and gives them rows and blocks. A policy orders the waiting ones, and
may restrain a step: refuse a request for now, limit a step's tokens, choose who loses its blocks.

What a policy answers follows from what it was told alone, so that all ranks schedule alike. It reads no clock and
draws no random numbers: time is counted in steps (`PolicyLoad.step`) and in arrivals (`PolicyRequest.number`).

A policy restrains only while requests run: with none running, the core asks for no budget and no veto, and admits the
first request that fits. So no policy can stop an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from attrs import field, frozen

from slotline.registry.capability import Flag, Set
from slotline.registry.declared import declared
from slotline.registry.errors import ContractError

Rank = tuple[int | float, ...]
"""Standing of a request: lower goes first. All ranks of a policy have the same length."""


@frozen(kw_only=True, field_transformer=declared)
class SchedulerPolicyCapabilities:
    """Capabilities that a scheduler policy declares.

    Attributes:
        priorities: it reads `PolicyRequest.priority`. Requests with a priority are refused otherwise.
        inputs: names of further arguments of `Engine.add` that it reads from `PolicyRequest.inputs`.
        ranks: its answers follow from what it was told alone, so that engines of several ranks can use it.
        admits: it has `SchedulerPolicy.admits`.
        budgets: it has `SchedulerPolicy.budget`.
        victims: it has `SchedulerPolicy.victim`.
        accounts: it has `SchedulerPolicy.admitted` and `SchedulerPolicy.left`.
        validates: it has `SchedulerPolicy.validate`.
        devices: device types. Policies touch no device, so most support any.
    """

    priorities: Flag = Flag(False)
    inputs: tuple[str, ...] = ()
    ranks: Flag = Flag(True)
    admits: Flag = Flag(False)
    budgets: Flag = Flag(False)
    victims: Flag = Flag(False)
    accounts: Flag = Flag(False)
    validates: Flag = Flag(False)
    devices: Set[str] = Set(None)


@frozen(kw_only=True)
class SchedulerPolicyContext:
    """Input of a scheduler policy's factory, once for each engine.

    Attributes:
        max_requests: most requests that run at a time.
        max_batched_tokens: most tokens of a step.
        max_model_len: most tokens of a request.
        options: the plugin's own table.
    """

    contract: int
    max_requests: int
    max_batched_tokens: int
    max_model_len: int
    options: Any = None


def _shown(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(inputs))


@frozen(kw_only=True)
class PolicyRequest:
    """Request as a policy sees it. It is made anew whenever the request begins to wait.

    Attributes:
        number: order of arrival. No two unfinished requests have the same, and a preempted one keeps it.
        num_prompt_tokens: at least 1.
        num_tokens: tokens of the prompt, and outputs so far.
        max_tokens: most outputs that it may get, those so far included. 0 for a request that samples nothing.
        priority: lower goes first, 0 by default.
        preemptions: how often it lost its blocks.
        inputs: those that the policy declares and the request has.
    """

    number: int
    num_prompt_tokens: int
    num_tokens: int
    max_tokens: int
    priority: int = 0
    preemptions: int = 0
    inputs: Mapping[str, Any] = field(factory=dict, converter=_shown)

    @property
    def num_remaining(self) -> int:
        """Return the most tokens that are left to compute: all known ones, and the outputs that may come."""
        return self.num_prompt_tokens + self.max_tokens


@frozen(kw_only=True)
class PolicyLoad:
    """State of the engine before a step, or while it admits requests.

    Attributes:
        step: number of the step, ascending.
        num_running: requests that run.
        num_waiting: requests that wait.
        num_free_rows: rows that no request holds.
        num_free_blocks: free blocks of the cache. `num_blocks` are there in all.
        max_batched_tokens: most tokens of a step.
    """

    step: int
    num_running: int
    num_waiting: int
    num_free_rows: int
    num_free_blocks: int
    num_blocks: int
    max_batched_tokens: int


@frozen(kw_only=True)
class StepBudget:
    """Limits of one step.

    Attributes:
        tokens: most tokens of the step, at least 1. More than `PolicyLoad.max_batched_tokens` changes nothing. Requests
            late in the order wait if it is less than one for each that runs.
        requests: most requests that join in the step. 0 holds all back.

    Raises:
        ContractError: if one is no such number.
    """

    tokens: int | None = None
    requests: int | None = None

    def __attrs_post_init__(self) -> None:
        for name, least in (("tokens", 1), ("requests", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ContractError(
                    f"StepBudget.{name} is {value!r:.60}, expected an integer from {least} on, or None",
                    fix=f"correct {name} in the policy's budget",
                )


class SchedulerPolicy(Protocol):
    """Product of a scheduler policy's factory: the waiting requests in its order.

    `slotline.registry.ranked_policy.RankedPolicy` has the first five methods, for a policy whose order follows from
    what a request is when it begins to wait. The others are asked of policies that declare them.
    """

    def rank(self, request: PolicyRequest) -> Rank:
        """Return the standing of a request among those that run. Asked before each `push` of it.

        The first in this order get their tokens first, and the last is preempted, unless there is a `victim`. Equal
        ranks go by number.
        """
        ...

    def push(self, request: PolicyRequest) -> None:
        """Have a request wait: a new one, a preempted one, or one that was passed over in this step."""
        ...

    def head(self) -> int:
        """Return the number of the waiting request to admit first. There is one. It stays until it is removed."""
        ...

    def remove(self, number: int) -> None:
        """Take a waiting request out: it runs now, was passed over, or ended. It is mostly the head, not always."""
        ...

    def restart(self) -> None:
        """Forget all requests. Those that are unfinished are pushed again, after an exception escaped from a step."""
        ...

    def admitted(self, number: int) -> None:
        """Hear that a request runs, after `remove`. For policies that declare `accounts`."""
        ...

    def left(self, number: int, num_tokens: int) -> None:
        """Hear that a request ended, waiting or running, with so many tokens: its prompt's and its outputs.

        For policies that declare `accounts`.
        """
        ...

    def validate(self, request: PolicyRequest) -> None:
        """Look at a new request before it is queued, to refuse wrong `inputs`. It changes nothing.

        For policies that declare `validates`.

        Raises:
            RequestError: naming the value and the remedy.
        """
        ...

    def admits(self, request: PolicyRequest, load: PolicyLoad) -> bool:
        """Return whether a request may join in this step. If not, those behind it are asked. Hold all by a budget.

        An error ends this request alone. For policies that declare `admits`.
        """
        ...

    def budget(self, load: PolicyLoad) -> StepBudget:
        """Return the limits of the step that begins. For policies that declare `budgets`."""
        ...

    def victim(self, running: Sequence[PolicyRequest]) -> int:
        """Return the number of the running request that loses its blocks, since another needs some.

        For policies that declare `victims`.

        Args:
            running: in the order of their ranks, at least one. Each is as it was when it began to wait.
        """
        ...
