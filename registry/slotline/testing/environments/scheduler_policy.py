"""Traffic for a scheduler policy: a scheduler in small that asks it as the core does, and checks each answer."""

from __future__ import annotations

import math
from typing import Any

from attrs import define, evolve

from slotline.registry.contracts import PolicyLoad, PolicyRequest, SchedulerPolicyContext, StepBudget
from slotline.testing.check import Failed, Run

MAX_MODEL_LEN = 512
FIRST = 100
"""Number of the first request, so that numbers are no places."""


@define(eq=False)
class Running:
    """A running request, its standing and the steps until it ends."""

    view: PolicyRequest
    order: tuple[Any, int]
    steps: int


class Traffic:
    """Requests of one engine, and its policy.

    Attributes:
        log: what happened, in order: two engines with the same traffic have the same.
        joined: numbers in the order of their first admission.
    """

    def __init__(self, run: Run, rows: int = 4) -> None:
        self._offer, self._rows = run.subject.capabilities, rows
        context = SchedulerPolicyContext(
            contract=1, max_requests=rows, max_batched_tokens=256, max_model_len=MAX_MODEL_LEN
        )
        self.policy: Any = run.subject.build(context)
        self.waiting: dict[int, PolicyRequest] = {}
        self.running: list[Running] = []
        self.log: list[Any] = []
        self.joined: list[int] = []
        self._number, self._step = FIRST, 0
        self._width: int | None = None

    def add(
        self, prompt: int, outputs: int, *, priority: int = 0, tenant: str = "", number: int | None = None
    ) -> PolicyRequest:
        """Have a request arrive, with a number of its own unless one is given."""
        if number is None:
            number, self._number = self._number, self._number + 1
        inputs = {"tenant": tenant} if tenant and "tenant" in self._offer.inputs else {}
        view = PolicyRequest(
            number=number,
            num_prompt_tokens=prompt,
            num_tokens=prompt,
            max_tokens=outputs,
            priority=priority if self._offer.priorities.support else 0,
            inputs=inputs,
        )
        if self._offer.validates.support:
            self.policy.validate(view)
        self.push(view)
        return view

    def push(self, view: PolicyRequest) -> None:
        """Have a request wait."""
        self._rank(view)
        self.policy.push(view)
        self.waiting[view.number] = view

    def head(self) -> int:
        """Return the number of the first waiting request, which the policy must not forget when it is asked again."""
        number, again = self.policy.head(), self.policy.head()
        if number not in self.waiting or isinstance(number, bool):
            raise Failed(f"head gave {number!r:.60}, and {sorted(self.waiting)[:20]} wait")
        if again != number:
            raise Failed(f"head gave {number}, then {again!r:.60}, and nothing happened between")
        return int(number)

    def remove(self, number: int) -> PolicyRequest:
        """Take a waiting request out."""
        self.policy.remove(number)
        return self.waiting.pop(number)

    def join(self, number: int, steps: int) -> None:
        """Admit a waiting request, which runs for some steps."""
        view = self.remove(number)
        if self._offer.accounts.support:
            self.policy.admitted(number)
        if number not in self.joined:
            self.joined.append(number)
        self.log.append(("joins", number))
        self.running.append(Running(view, (self._rank(view), number), steps))
        self.running.sort(key=lambda one: one.order)

    def leave(self, number: int, outputs: int = 0) -> None:
        """End a request, whether it waits or runs."""
        if number in self.waiting:
            view = self.remove(number)
        else:
            view = next(one.view for one in self.running if one.view.number == number)
            self.running = [one for one in self.running if one.view.number != number]
        if self._offer.accounts.support:
            self.policy.left(number, view.num_prompt_tokens + outputs)
        self.log.append(("left", number))

    def preempt(self) -> None:
        """Take the blocks of a running request: the last, or whom the policy names."""
        place = len(self.running) - 1
        if self._offer.victims.support:
            number = self.policy.victim([one.view for one in self.running])
            places = [index for index, one in enumerate(self.running) if one.view.number == number]
            if not places or isinstance(number, bool):
                raise Failed(f"victim gave {number!r:.60}, and {[one.view.number for one in self.running]} run")
            place = places[0]
        view = self.running.pop(place).view
        self.log.append(("loses", view.number))
        self.push(evolve(view, num_tokens=view.num_tokens + 1, preemptions=view.preemptions + 1))

    def step(self, steps: int = 2) -> None:
        """Run a step: limits, admissions while rows last, and progress of those that run."""
        self._step += 1
        most = self.budget()
        joined, aside = 0, list[PolicyRequest]()
        while self.waiting and len(self.running) < self._rows and joined < most:
            number = self.head()
            if self.running and not self.admits(self.waiting[number]):
                aside.append(self.remove(number))
                continue
            self.join(number, steps)
            joined += 1
        for view in aside:
            self.push(view)
        if self.waiting and not self.running:
            raise Failed("requests wait, and none runs")
        for one in list(self.running):
            one.steps -= 1
            if one.steps <= 0:
                self.leave(one.view.number, outputs=min(steps, one.view.max_tokens))

    def drain(self, steps: int = 2) -> None:
        """Run until no request is left."""
        for _ in range(50 + 3 * (len(self.waiting) + len(self.running)) * steps):
            if not self.waiting and not self.running:
                return
            self.step(steps)
        raise Failed(f"requests {sorted(self.waiting)[:20]} still wait")

    def load(self, **changes: Any) -> PolicyLoad:
        """Return the engine's load, with some fields changed."""
        load = PolicyLoad(
            step=self._step,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_rows=self._rows - len(self.running),
            num_free_blocks=32,
            num_blocks=64,
            max_batched_tokens=256,
        )
        return evolve(load, **changes)

    def budget(self, load: PolicyLoad | None = None) -> int:
        """Return the most requests that join in a step."""
        if not self._offer.budgets.support or not (self.running or load):
            return self._rows
        budget = self.policy.budget(load or self.load())
        if not isinstance(budget, StepBudget):
            raise Failed(f"budget gave {budget!r:.60}, expected a StepBudget")
        self.log.append(budget)
        return self._rows if budget.requests is None else budget.requests

    def admits(self, view: PolicyRequest, load: PolicyLoad | None = None) -> bool:
        """Return whether a request may join."""
        if not self._offer.admits.support:
            return True
        answer = self.policy.admits(view, load or self.load())
        if not isinstance(answer, bool):
            raise Failed(f"admits gave {answer!r:.60}, expected True or False")
        self.log.append(answer)
        return answer

    def restart(self) -> None:
        """Have the policy forget all, and push the unfinished again."""
        self.policy.restart()
        views = [*self.waiting.values(), *(one.view for one in self.running)]
        self.waiting, self.running = {}, []
        for view in sorted(views, key=lambda one: one.number):
            self.push(view)

    def _rank(self, view: PolicyRequest) -> Any:
        rank, again = self.policy.rank(view), self.policy.rank(view)
        if not isinstance(rank, tuple) or not all(_number(one) for one in rank):
            raise Failed(f"rank gave {rank!r:.60}, expected a tuple of numbers")
        if rank != again:
            raise Failed(f"rank gave {rank}, then {again!r:.60} for the same request")
        if self._width not in (None, len(rank)):
            raise Failed(f"rank gave {rank}, and ranks of {self._width} numbers before")
        self._width = len(rank)
        return rank


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
