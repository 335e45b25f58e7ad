"""Random histories of attention requests, drawn by Hypothesis: the stateful check's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slotline.testing.check import Failed, NotApplicable, Run
from slotline.testing.environments.attention_history import Pool

MOST_REQUESTS = 8
EXAMPLES = ((10, 5), (14, 16))
"""(histories, steps of each): short ones first, since what they find is easiest to read."""


def explore(run: Run, new_pool: Callable[[], Pool], longest_query: int) -> None:
    """Drive pools through random histories. The oracle checks each step.

    Args:
        run: records the worst error. A seed changed by the subject gives other histories.
        new_pool: returns a pool with a new backend.
        longest_query: most new tokens of a request in one step.

    Raises:
        Failed: with the history that led there.
        NotApplicable: without Hypothesis.
    """
    try:
        from hypothesis import HealthCheck, Phase, seed, settings
        from hypothesis.stateful import run_state_machine_as_test
    except ImportError:
        raise NotApplicable("needs Hypothesis: pip install 'slotline[conformance]'") from None

    times = 10 if run.subject.exhaustive else 1
    for examples, steps in EXAMPLES:
        machine = _machine(run, new_pool, longest_query)
        moved = bool(run.subject.seed)
        options = settings(
            max_examples=examples * times,
            stateful_step_count=steps,
            derandomize=not moved,
            database=None,
            deadline=None,
            phases=(Phase.generate,),  # short histories are tried first instead of spending minutes on shrinking
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        run_state_machine_as_test(seed(run.seed)(machine) if moved else machine, settings=options)


def _machine(run: Run, new_pool: Callable[[], Pool], longest_query: int) -> Any:
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

    class History(RuleBasedStateMachine):
        """State machine in which requests come, decode, verify drafts, fork and finish. Each step is checked."""

        def __init__(self) -> None:
            super().__init__()
            self.pool = new_pool()

        def _step(self, new_tokens: dict[int, int], what: str = "step") -> None:
            self._told(f"{what} {new_tokens}")
            try:
                self.pool.step(new_tokens, run)
            except Exception as error:  # a plugin may raise anything
                story = "; ".join(self.pool.steps)
                said = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
                raise Failed(f"{said}\nhistory (request: new tokens): {story}") from error

        def _told(self, what: str) -> None:
            self.pool.steps.append(what)

        def _one(self, data: Any) -> int:
            return int(data.draw(st.sampled_from(sorted(self.pool.requests))))

        @precondition(lambda self: len(self.pool.requests) < MOST_REQUESTS)
        @rule(length=st.integers(1, 70))
        def admit(self, length: int) -> None:
            """Add a request with its prompt, in as many steps as its length needs."""
            number = self.pool.admit()
            self._told(f"admit {number}")
            while length > 0 and self.pool.room_for(number, min(length, longest_query)):
                count = min(length, longest_query)
                self._step({number: count})
                length -= count

        @precondition(lambda self: self.pool.requests)
        @rule(data=st.data())
        def decode(self, data: Any) -> None:
            """Run a step in which some requests get no token, one or four, and others are missing."""
            numbers = data.draw(st.permutations(sorted(self.pool.requests)))
            counts = st.sampled_from([1, 1, 0, min(4, longest_query), None])
            batch: dict[int, int] = {}
            taken = 0
            for number in numbers:
                count = data.draw(counts)
                room = len(self.pool.free) - taken >= 3
                if count is not None and (room or count == 0) and self.pool.room_for(number, count):
                    batch[number] = count
                    taken += 2 if count else 0
            if batch:
                self._step(batch)

        @precondition(lambda self: self.pool.requests)
        @rule(data=st.data(), drafts=st.integers(1, 4))
        def verify(self, data: Any, drafts: int) -> None:
            """Run a step over 1 + k tokens of which some are rejected."""
            number, count = self._one(data), min(1 + drafts, longest_query)
            if self.pool.room_for(number, count):
                accepted = data.draw(st.integers(1, count))
                self._step({number: count}, "verify")
                length = self.pool.requests[number].length - count + accepted
                self._told(f"roll {number} back to {length} tokens")
                self.pool.roll_back(number, length)

        @precondition(lambda self: 0 < len(self.pool.requests) < MOST_REQUESTS)
        @rule(data=st.data())
        def fork(self, data: Any) -> None:
            """Add a second request that shares the blocks of the first until it writes."""
            number = self._one(data)
            self._told(f"fork {number} as {self.pool.fork(number)}")

        @precondition(lambda self: self.pool.requests)
        @rule(data=st.data())
        def finish(self, data: Any) -> None:
            """Finish a request, whose blocks are reused first."""
            number = self._one(data)
            self._told(f"finish {number}")
            self.pool.finish(number)

    return History
