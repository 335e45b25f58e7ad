"""L3: long random histories over slots, each step compared with the exact values."""

from __future__ import annotations

from typing import Any

from slotline.conformance.state.problems import by_kind, hostile, most_tokens, problem_of
from slotline.conformance.state.session import Request, Session
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check

DRAFTS = 3
SLOTS = 7
LENGTHS = (0, 1, 1, 1, 2, 3, 5, 9, 33)
EXAMPLES = 12
STEPS = 12


@check(Kind.STATE, "state.history.random", Level.STATEFUL, cases=by_kind, profile="mixed", cost=3.0, explores=True)
def random_history(run: Run) -> None:
    """Admit, extend by none, one or many tokens, verify and commit, checkpoint, resume, finish: in any order."""
    try:
        from hypothesis import HealthCheck, Phase, settings
        from hypothesis.stateful import run_state_machine_as_test
    except ImportError:
        raise NotApplicable("needs hypothesis: install slotline[conformance]") from None
    run_state_machine_as_test(
        _machine(run),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],  # the history is in the message; shrinking costs more than it tells
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        ),
    )


class History:
    """The live requests, the free slots, and what has been done, in words.

    Free slots are handed out last in, first out, and a new owner finds what the last one left or NaN.
    """

    def __init__(self, run: Run) -> None:
        can = run.subject.capabilities
        self.most = most_tokens(run.subject)
        self.rollback = bool(can.rollback.support) and self.most > 1
        self.checkpoints = bool(can.checkpoints.support)
        self.session: Session = hostile(
            run, problem_of(run), num_slots=SLOTS, max_draft_tokens=DRAFTS if self.rollback else 0
        )
        self.free = list(range(SLOTS))
        self.live: list[Request] = []
        self.kept: list[Request] = []
        self.told: list[str] = []
        self.names = 0

    def name(self) -> str:
        self.names += 1
        return f"request {self.names}"

    def admit(self, clean: bool) -> None:
        slot = self.free.pop()
        make = self.session.request if clean else self.session.request_in_place
        self.live.append(make(slot, self.name()))
        self.told.append(f"{self.live[-1].name} admitted to slot {slot}")

    def step(self, order: list[Request | None], counts: list[int]) -> None:
        rows = [(request, min(count, self.most)) for request, count in zip(order, counts, strict=True)]
        names = [f"{request.name if request else 'padding'} +{count}" for request, count in rows]
        self.told.append("step: " + ", ".join(names))
        self.session.step(rows)

    def commit(self, accepted: dict[int, int]) -> None:
        self.told.append(f"commit by slot: {accepted}")
        self.session.commit(accepted)

    def keep(self, request: Request) -> None:
        slot = self.free.pop()
        self.told.append(f"checkpoint of {request.name} to slot {slot}")
        self.kept.append(self.session.copy(request, slot, f"checkpoint of {request.name}"))

    def resume(self, kept: Request) -> None:
        slot, name = self.free.pop(), self.name()
        self.told.append(f"{name} resumed from the {kept.name} in slot {slot}")
        self.live.append(self.session.copy(kept, slot, name))

    def finish(self, request: Request, among: list[Request]) -> None:
        self.told.append(f"{request.name} leaves slot {request.slot}")
        among.remove(request)
        self.free.append(request.slot)


def _machine(run: Run) -> Any:
    """Return the state machine, defined here since hypothesis is not a dependency of the package."""
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.history = History(run)

        def told(self, action: Any, *arguments: Any) -> None:
            try:
                action(*arguments)
            except Exception as error:
                raise Failed(f"{error}\nhistory: {'; '.join(self.history.told)}") from error

        @precondition(lambda self: self.history.free)
        @rule(clean=st.booleans())
        def admit(self, clean: bool) -> None:
            self.told(self.history.admit, clean)

        @precondition(lambda self: self.history.live)
        @rule(data=st.data())
        def extend(self, data: Any) -> None:
            rows: list[Request | None] = list(self.history.live)
            rows += [None] * data.draw(st.integers(0, 2))
            order = data.draw(st.permutations(rows))
            counts = [data.draw(st.sampled_from(LENGTHS)) for _ in order]
            if sum(counts):
                self.told(self.history.step, order, counts)

        @precondition(lambda self: self.history.rollback and self.history.live)
        @rule(data=st.data())
        def verify(self, data: Any) -> None:
            order = data.draw(st.permutations(self.history.live))
            counts = [data.draw(st.integers(1, min(1 + DRAFTS, self.history.most))) for _ in order]
            self.told(self.history.step, list(order), counts)
            pairs = zip(order, counts, strict=True)
            accepted = {row.slot: data.draw(st.integers(1, count)) for row, count in pairs if data.draw(st.booleans())}
            self.told(self.history.commit, accepted)

        @precondition(lambda self: self.history.checkpoints and self.history.free and self._started())
        @rule(data=st.data())
        def keep(self, data: Any) -> None:
            self.told(self.history.keep, data.draw(st.sampled_from(self._started())))

        @precondition(lambda self: self.history.kept and self.history.free)
        @rule(data=st.data())
        def resume(self, data: Any) -> None:
            self.told(self.history.resume, data.draw(st.sampled_from(self.history.kept)))

        @precondition(lambda self: self.history.live or self.history.kept)
        @rule(data=st.data())
        def finish(self, data: Any) -> None:
            among = data.draw(st.sampled_from([x for x in (self.history.live, self.history.kept) if x]))
            self.told(self.history.finish, data.draw(st.sampled_from(among)), among)

        def _started(self) -> list[Request]:
            return [request for request in self.history.live if request.seen]

    return Machine
