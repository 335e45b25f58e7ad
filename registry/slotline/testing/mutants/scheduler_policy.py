"""Broken scheduler policies, one bug each, and right ones that differ."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import attrs

from slotline.registry.contracts import PolicyLoad, PolicyRequest, StepBudget
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference import scheduler_policy as reference
from slotline.testing.reference.scheduler_policy import Careful


class LosesPreempted(Careful):
    def push(self, request: PolicyRequest) -> None:
        if request.preemptions < 2:
            super().push(request)


class KeepsRemoved(Careful):
    def remove(self, number: int) -> None:
        """Keep it."""


class RemovesHead(Careful):
    def remove(self, number: int) -> None:
        self.order.pop(0)


class RemovesLast(Careful):
    def remove(self, number: int) -> None:
        self.order.remove(number)
        if number != min([number, *self.order]) and self.order:
            self.order.pop()


class NewestFirst(Careful):
    def head(self) -> int:
        return self.order[-1]


class ShortestForEver(Careful):
    def head(self) -> int:
        return min(self.order, key=lambda number: (self.tokens[number], number))


class LongestForEver(Careful):
    def head(self) -> int:
        return max(self.order, key=lambda number: (self.tokens[number], -number))


class PreemptedLast(Careful):
    """A preempted request goes behind all that have come and will come."""

    def push(self, request: PolicyRequest) -> None:
        super().push(request)
        self.late = {*getattr(self, "late", ()), *([request.number] if request.preemptions else ())}

    def head(self) -> int:
        return min(self.order, key=lambda number: (number in self.late, number))


class DrawsHead(Careful):
    def head(self) -> int:
        return random.choice(self.order)


class DrawsPlaces(Careful):
    def push(self, request: PolicyRequest) -> None:
        super().push(request)
        self.drawn = {request.number: random.random(), **getattr(self, "drawn", {})}

    def head(self) -> int:
        return min(self.order, key=lambda number: (self.drawn[number] > 0.5, number))


class ByClock(Careful):
    def push(self, request: PolicyRequest) -> None:
        super().push(request)
        self.times = {request.number: time.monotonic(), **getattr(self, "times", {})}

    def head(self) -> int:
        return min(self.order, key=lambda number: (self.times[number], number))


class ClockedVeto(Careful):
    def admits(self, request: PolicyRequest, load: PolicyLoad) -> bool:
        return super().admits(request, load) and time.monotonic() % 8 < 6


class OneForAll(Careful):
    seen: list[int] = []  # noqa: RUF012, shared by all instances, which is the bug

    def admits(self, request: PolicyRequest, load: PolicyLoad) -> bool:
        self.seen.append(request.number)
        return len(self.seen) % 3 > 0


class BareRank(Careful):
    def rank(self, request: PolicyRequest) -> Any:
        return request.number


class RankOfNone(Careful):
    def rank(self, request: PolicyRequest) -> Any:
        return (request.priority or None, request.number)


class RankOfNan(Careful):
    def rank(self, request: PolicyRequest) -> Any:
        return (request.number / request.max_tokens if request.max_tokens else float("nan"),)


class UnevenRanks(Careful):
    def rank(self, request: PolicyRequest) -> Any:
        return (request.number, *([request.preemptions] if request.preemptions else []))


class RanksCounted(Careful):
    count = 0

    def rank(self, request: PolicyRequest) -> Any:
        self.count += 1
        return (self.count,)


class BudgetOfRows(Careful):
    def budget(self, load: PolicyLoad) -> StepBudget:
        return StepBudget(tokens=load.num_free_rows, requests=1)


class BudgetOfBlocks(Careful):
    def budget(self, load: PolicyLoad) -> StepBudget:
        return StepBudget(tokens=load.num_free_blocks * 4)


class BudgetOfHalves(Careful):
    def budget(self, load: PolicyLoad) -> StepBudget:
        return StepBudget(tokens=load.max_batched_tokens / 2)  # type: ignore[arg-type]


class BareBudget(Careful):
    def budget(self, load: PolicyLoad) -> Any:
        return self.most


class NegativeBudget(Careful):
    def budget(self, load: PolicyLoad) -> StepBudget:
        return StepBudget(requests=2 - load.num_running)


class SilentVeto(Careful):
    def admits(self, request: PolicyRequest, load: PolicyLoad) -> Any:
        return True if load.num_free_blocks > 16 else None


class CountedVeto(Careful):
    def admits(self, request: PolicyRequest, load: PolicyLoad) -> Any:
        return load.num_free_rows


class VictimWaits(Careful):
    def victim(self, running: Sequence[PolicyRequest]) -> int:
        return self.order[-1] if self.order else running[-1].number


class VictimByPlace(Careful):
    def victim(self, running: Sequence[PolicyRequest]) -> int:
        return len(running) - 1


class KeepsAtRestart(Careful):
    def restart(self) -> None:
        self.tokens.clear()


class LeftByRunningOnly(Careful):
    def admitted(self, number: int) -> None:
        self.ran = {*getattr(self, "ran", ()), number}

    def left(self, number: int, num_tokens: int) -> None:
        self.ran.remove(number)


class AdmittedOnce(Careful):
    def admitted(self, number: int) -> None:
        self.ran = {*getattr(self, "ran", ())}
        if number in self.ran:
            raise KeyError(number)
        self.ran.add(number)

    def left(self, number: int, num_tokens: int) -> None:
        getattr(self, "ran", set()).discard(number)


class PassedOverLast(Careful):
    def push(self, request: PolicyRequest) -> None:
        self.order.append(request.number)
        self.tokens.setdefault(request.number, request.num_prompt_tokens)


class NumbersOnce(Careful):
    def push(self, request: PolicyRequest) -> None:
        self.seen: set[int] = getattr(self, "seen", set())
        if not request.preemptions and request.number in self.seen and request.number not in self.tokens:
            return
        self.seen.add(request.number)
        super().push(request)

    def restart(self) -> None:
        super().restart()
        self.seen = set()


class EqualAreOne(Careful):
    def push(self, request: PolicyRequest) -> None:
        same = [one for one in self.order if self.tokens[one] == request.num_prompt_tokens]
        if len(same) < 8:
            super().push(request)


class HeadPops(Careful):
    def head(self) -> int:
        return self.order.pop(0)

    def remove(self, number: int) -> None:
        if number in self.order:
            self.order.remove(number)


class TiredAfterAWhile(Careful):
    count = 0

    def push(self, request: PolicyRequest) -> None:
        self.count += 1
        if self.count != 100:
            super().push(request)


def _mutant(name: str, summary: str, level: Level, factory: Any) -> Mutant:
    changed = attrs.evolve(
        reference.descriptor, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory
    )
    return Mutant(name, summary, level, changed)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("loses-preempted", "forgets a request that is preempted twice", Level.NUMERICS, LosesPreempted),
    _mutant("keeps-removed", "names requests that run", Level.NUMERICS, KeepsRemoved),
    _mutant("removes-head", "takes out the first, whichever ended", Level.HOSTILE, RemovesHead),
    _mutant("removes-last", "loses the last when another than the first ends", Level.HOSTILE, RemovesLast),
    _mutant("newest-first", "lets the first that came wait for ever", Level.STATEFUL, NewestFirst),
    _mutant("shortest-for-ever", "lets long ones wait for ever", Level.STATEFUL, ShortestForEver),
    _mutant("longest-for-ever", "lets short ones wait for ever", Level.STATEFUL, LongestForEver),
    _mutant("preempted-last", "lets preempted ones wait for ever", Level.STATEFUL, PreemptedLast),
    _mutant("draws-head", "draws the first", Level.NUMERICS, DrawsHead),
    _mutant("draws-places", "draws a place at arrival", Level.HOSTILE, DrawsPlaces),
    _mutant("by-clock", "orders by the clock of the process", Level.HOSTILE, ByClock),
    _mutant("clocked-veto", "refuses by the clock of the process", Level.HOSTILE, ClockedVeto),
    _mutant("one-for-all", "shares a counter among engines", Level.HOSTILE, OneForAll),
    _mutant("bare-rank", "ranks by a number that is no tuple", Level.NUMERICS, BareRank),
    _mutant("rank-of-none", "has None for no priority", Level.NUMERICS, RankOfNone),
    _mutant("rank-of-nan", "divides by no outputs", Level.NUMERICS, RankOfNan),
    _mutant("uneven-ranks", "has longer ranks after preemption", Level.NUMERICS, UnevenRanks),
    _mutant("ranks-counted", "gives a request another rank each time", Level.NUMERICS, RanksCounted),
    _mutant("budget-of-rows", "gives no token where no row is free", Level.NUMERICS, BudgetOfRows),
    _mutant("budget-of-blocks", "gives no token where no block is free", Level.HOSTILE, BudgetOfBlocks),
    _mutant("budget-of-halves", "gives half a token", Level.NUMERICS, BudgetOfHalves),
    _mutant("bare-budget", "gives a number for a budget", Level.NUMERICS, BareBudget),
    _mutant("negative-budget", "lets less than no request join", Level.NUMERICS, NegativeBudget),
    _mutant("silent-veto", "says nothing for a veto", Level.HOSTILE, SilentVeto),
    _mutant("counted-veto", "counts rows for a veto", Level.NUMERICS, CountedVeto),
    _mutant("victim-waits", "takes blocks of one that has none", Level.NUMERICS, VictimWaits),
    _mutant("victim-by-place", "names a place for a number", Level.NUMERICS, VictimByPlace),
    _mutant("keeps-at-restart", "names requests from before a restart", Level.HOSTILE, KeepsAtRestart),
    _mutant("left-by-running", "fails when a waiting one ends", Level.HOSTILE, LeftByRunningOnly),
    _mutant("admitted-once", "fails when a preempted one joins", Level.NUMERICS, AdmittedOnce),
    _mutant("passed-over-last", "puts those that were passed over at the end", Level.HOSTILE, PassedOverLast),
    _mutant("numbers-once", "loses a request whose number was another's", Level.HOSTILE, NumbersOnce),
    _mutant("equal-are-one", "loses requests of equal length", Level.NUMERICS, EqualAreOne),
    _mutant("head-pops", "forgets the first when it names it", Level.NUMERICS, HeadPops),
    _mutant("tired", "loses the hundredth request", Level.STATEFUL, TiredAfterAWhile),
)

CORRECT: tuple[Correct, ...] = (
    Correct("first come, first served, with all methods", reference.descriptor),
    Correct("short prompts first, aged", reference.aged),
)
