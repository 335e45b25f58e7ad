"""Requests of a state backend with their exact states: run a step, compare every output and every state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import define, field
from torch import Tensor

from slotline.conformance.state.tolerance import allowed_error, largest_error
from slotline.testing.check import Run
from slotline.testing.environments.state import Part, Problem, Surroundings
from slotline.testing.oracles.state import EXACT, advance, log_decay, rounding, zero_state

Tensors = Mapping[str, Tensor]


@define
class Truth:
    """Expected state of one layer of one request: exact, and with the rounding that the contract allows.

    `length` counts its tokens and sums up their log decays (see `slotline.conformance.state.tolerance`).
    """

    problem: Problem
    exact: Tensors
    baseline: Tensors
    length: float = 0.0

    @classmethod
    def of(cls, problem: Problem) -> Truth:
        exact = zero_state(problem.layer)
        return cls(problem, exact, {name: value.float() for name, value in exact.items()})

    def advance(self, tokens: Tensors) -> tuple[Tensor, Tensor]:
        """Return the outputs of further tokens, exact and with rounding, and advance both states."""
        problem = self.problem
        inputs = {**problem.parameters, **tokens}
        exact, self.exact = advance(problem.layer, inputs, self.exact, EXACT)
        arithmetic = rounding(problem.dtype, problem.state_dtype)
        baseline, self.baseline = advance(problem.layer, inputs, self.baseline, arithmetic)
        self.length += exact.shape[0] + log_decay(problem.layer, inputs)
        return exact, baseline

    def fork(self) -> Truth:
        return Truth(self.problem, self.exact, self.baseline, self.length)


@define
class Request:
    """Request in a slot.

    Attributes:
        slot: slot of its state.
        truths: the expected state of each layer.
        seen: tokens so far.
        name: name for messages.
        accepted: number of tokens of its last step that a commit accepted. 1 without a commit, as in the batch.
    """

    slot: int
    truths: list[Truth]
    seen: int = 0
    name: str = ""
    accepted: int = 1

    def fork(self, slot: int, name: str) -> Request:
        """Return a request with the same history in another slot."""
        return Request(slot, [truth.fork() for truth in self.truths], self.seen, name)


@define
class Session:
    """A backend in its surroundings, and the run that measures it.

    Attributes:
        run: the run of the check.
        around: the surroundings.
        steps: how many have been run.
        last: for each row of the last step its request (None for padding), its part of the batch, and the truths
            before it, from which `commit` goes forward again.
    """

    run: Run
    around: Surroundings
    steps: int = 0
    last: list[tuple[Request | None, Part, list[Truth]]] = field(factory=list)

    def request(self, slot: int, name: str = "") -> Request:
        """Return a new request in a slot, which is filled with garbage."""
        self.around.refill(slot)
        return Request(slot, [Truth.of(problem) for problem in self.around.problems], 0, name or f"request in {slot}")

    def request_in_place(self, slot: int, name: str) -> Request:
        """Return a new request in a slot that still contains an earlier state."""
        return Request(slot, [Truth.of(problem) for problem in self.around.problems], 0, name)

    def tokens(self, count: int, seed: int = 0) -> tuple[Tensors, ...]:
        """Return random tokens for each layer."""
        base = self.run.seed % 100_003 + 7919 * seed
        return tuple(problem.tokens(count, base + index) for index, problem in enumerate(self.around.problems))

    def part(self, request: Request, tokens: tuple[Tensors, ...]) -> Part:
        return Part(request.slot, tokens, has_initial_state=request.seen > 0, accepted=request.accepted)

    def step(self, wanted: Sequence[tuple[Request | None, int]]) -> None:
        """Run a batch of (request, new tokens) with random tokens and compare all. None is a padding row."""
        rows = [(request, self.tokens(count, 1000 * self.steps + i)) for i, (request, count) in enumerate(wanted)]
        self.step_with(rows)

    def feed(self, wanted: Sequence[tuple[Request, int]]) -> None:
        """Run the same in several steps if the plugin limits the new tokens."""
        limit = self.run.subject.capabilities.query_len.limit or max(count for _, count in wanted)
        left = list(wanted)
        while left:
            self.step([(request, min(count, limit)) for request, count in left])
            left = [(request, count - limit) for request, count in left if count > limit]

    def step_with(
        self,
        rows: Sequence[tuple[Request | None, tuple[Tensors, ...]]],
        through: Callable[[Sequence[Part]], list[list[Tensor]]] | None = None,
    ) -> None:
        """Run the same with given tokens. `through` runs the batch instead of eager calls."""
        self.steps += 1
        parts = [Part(-1, tokens, False) if request is None else self.part(request, tokens) for request, tokens in rows]
        self.last = [
            (request, part, [] if request is None else [truth.fork() for truth in request.truths])
            for (request, _), part in zip(rows, parts, strict=True)
        ]
        outputs = (through or self.around.run)(parts)
        for row, (request, part, _) in enumerate(self.last):
            if request is not None:
                self._follow(request, part, [of_layer[row] for of_layer in outputs])

    def step_together(self, rows: Sequence[tuple[Request, tuple[Tensors, ...], int, int]]) -> None:
        """Run a batch of (request, tokens, first, last): of the given tokens those from first to last (excluded)."""
        self.step_with([(request, cut(tokens, first, last)) for request, tokens, first, last in rows])

    def _follow(self, request: Request, part: Part, outputs: list[Tensor]) -> None:
        if part.count:
            for truth, tokens, got in zip(request.truths, part.tokens, outputs, strict=True):
                exact, baseline = truth.advance(tokens)
                where = f"output of {self._where(request, part.count)}"
                self.compare(got, exact, baseline, truth.problem.dtype, truth.length, where)
            request.seen += part.count
            request.accepted = 1
        self.check_state(request, f"after {part.count} more tokens")

    def _where(self, request: Request, count: int) -> str:
        kinds = "+".join(problem.layer.state_kind for problem in self.around.problems)
        return f"{kinds}, {request.name} (slot {request.slot}), tokens {request.seen}..{request.seen + count - 1}"

    def check_state(self, request: Request, when: str) -> None:
        """Compare the slot's content. A request without tokens owns nothing yet."""
        if not request.seen:
            return
        for index, truth in enumerate(request.truths):
            held = self.around.read(index, request.slot)
            for spec in truth.problem.layer.tensors:
                where = f"state {spec.name!r} of {truth.problem.layer.state_kind}, {request.name}, {when}"
                exact, baseline = truth.exact[spec.name], truth.baseline[spec.name]
                dtype = getattr(torch, spec.dtype)
                self.compare(held[spec.name], exact, baseline, dtype, truth.length, where)

    def compare(
        self, got: Tensor, exact: Tensor, baseline: Tensor, dtype: torch.dtype, length: float, where: str
    ) -> None:
        allowed, own = allowed_error(exact, baseline, dtype, length)
        error, place = largest_error(got, exact)
        at = ", ".join(map(str, place))
        what = f"{where}: at [{at}] is {float(got[place]):.6g}, should be {float(exact[place]):.6g}"
        self.run.measure(error=error, allowed=allowed, baseline=own, what=what)

    def commit(self, accepted: Mapping[int, int]) -> None:
        """Accept only the first tokens of some requests (by slot) of the last step, and compare their states."""
        slots, counts = [], []
        for request, _, _ in self.last:
            chosen = request is not None and request.slot in accepted
            slots.append(request.slot if request is not None and chosen else -1)
            counts.append(accepted[request.slot] if request is not None and chosen else 1)
        self.around.commit(slots, counts)
        for request, part, before in self.last:
            if request is not None and request.slot in accepted:
                self._go_back(request, part, before, accepted[request.slot])
            elif request is not None:
                self.check_state(request, "after a commit of other requests")

    def _go_back(self, request: Request, part: Part, before: list[Truth], count: int) -> None:
        for truth, tokens in zip(before, part.tokens, strict=True):
            truth.advance(cut((tokens,), 0, count)[0])
        request.truths = before
        request.seen += count - part.count
        request.accepted = count
        self.check_state(request, f"after a commit of {count} of {part.count} tokens")

    def copy(self, request: Request, slot: int, name: str) -> Request:
        """Copy a request's state to another slot, filled with garbage before."""
        self.around.refill(slot)
        self.around.copy(request.slot, slot)
        copied = request.fork(slot, name)
        self.check_state(copied, f"right after a copy from slot {request.slot}")
        self.check_state(request, f"right after its copy to slot {slot}")
        return copied


def cut(tokens: tuple[Tensors, ...], first: int, last: int) -> tuple[Tensors, ...]:
    """Return some of the tokens, for each layer."""
    return tuple({name: value[first:last] for name, value in of_layer.items()} for of_layer in tokens)
