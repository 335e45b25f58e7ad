"""L2: going back to the accepted draft position, and checkpoints."""

from __future__ import annotations

from slotline.conformance.state.problems import by_kind, hostile, problem_of
from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, Run, check

DRAFTS = 3
NEEDS = {"rollback": True, "query_len": 1 + DRAFTS}


@check(
    Kind.STATE, "state.rollback.each_position", Level.HOSTILE, cases=by_kind, needs=NEEDS, profile="spec-q", cost=0.4
)
def each_position(run: Run) -> None:
    """After a commit the state is as after the accepted tokens, for each number of them, and the request goes on."""
    session = hostile(run, max_draft_tokens=DRAFTS)
    requests = [session.request(slot) for slot in (5, 2, 0, 3)]
    session.feed([(request, 2 + index) for index, request in enumerate(requests)])
    session.step([(request, 1 + DRAFTS) for request in requests])
    session.commit({request.slot: 1 + index for index, request in enumerate(requests)})
    session.step([(request, 1) for request in requests])


@check(
    Kind.STATE, "state.rollback.several_steps", Level.HOSTILE, cases=by_kind, needs=NEEDS, profile="spec-q", cost=0.45
)
def several_steps(run: Run) -> None:
    """Verification after verification, with other positions, other orders of rows and fewer drafts each time."""
    session = hostile(run, max_draft_tokens=DRAFTS)
    requests = [session.request(slot) for slot in (1, 4, 2)]
    session.feed([(request, 3) for request in requests])
    rng = run.rng
    for _ in range(4):
        rng.shuffle(requests)
        counts = [rng.randint(2, 1 + DRAFTS) for _ in requests]
        session.step(list(zip(requests, counts, strict=True)))
        accepted = zip(requests, counts, strict=True)
        session.commit({request.slot: rng.randint(1, count) for request, count in accepted})


@check(
    Kind.STATE,
    "state.rollback.other_rows",
    Level.HOSTILE,
    cases=by_kind,
    needs={"rollback": True, "query_len": 9},
    profile="mixed",
    cost=0.43,
)
def other_rows(run: Run) -> None:
    """A commit does not change rows with -1: prompts, padding and single tokens next to the verified requests."""
    session = hostile(run, max_draft_tokens=DRAFTS)
    old, verified, fresh = session.request(4), session.request(1), session.request(5)
    session.step([(old, 3), (verified, 4)])
    session.step([(old, 1), (None, 2), (fresh, 9), (verified, 3), (None, 1)])
    session.commit({verified.slot: 1})
    session.step([(fresh, 1), (verified, 1), (old, 4)])
    session.commit({old.slot: 2, verified.slot: 1})
    session.step([(old, 1), (verified, 1), (fresh, 1)])


@check(Kind.STATE, "state.rollback.first_step", Level.HOSTILE, cases=by_kind, needs=NEEDS, profile="spec-q", cost=0.42)
def first_step(run: Run) -> None:
    """A request that is verified in its first step goes back to a state that was never in its slot."""
    session = hostile(run, max_draft_tokens=DRAFTS)
    first, second = session.request(3), session.request(0)
    session.step([(first, 1 + DRAFTS), (second, 2)])
    session.commit({first.slot: 2, second.slot: 1})
    session.step([(first, 1), (second, 1)])


@check(Kind.STATE, "state.rollback.layers", Level.HOSTILE, cases=by_kind, needs=NEEDS, profile="spec-q", cost=0.44)
def rollback_layers(run: Run) -> None:
    """All layers run before the first commits: what a backend keeps for going back is each layer's own."""
    kinds = [run["kind"], *(kind["kind"] for kind in by_kind(run.subject))][:3]
    problems = [problem_of(run, kind, index=index) for index, kind in enumerate(kinds)]
    session = hostile(run, *problems, max_draft_tokens=DRAFTS)
    first, second = session.request(2), session.request(5)
    session.feed([(first, 2), (second, 5)])
    session.step([(first, 3), (second, 4)])
    session.commit({first.slot: 2, second.slot: 1})
    session.step([(second, 1), (first, 1)])


@check(
    Kind.STATE, "state.rollback.without_commit", Level.HOSTILE, cases=by_kind, needs=NEEDS, profile="spec-q", cost=0.41
)
def without_commit(run: Run) -> None:
    """Without a commit, all tokens of the step count."""
    session = hostile(run, max_draft_tokens=DRAFTS)
    first, second = session.request(1), session.request(4)
    session.feed([(first, 2), (second, 3)])
    session.step([(first, 4), (second, 2)])
    session.step([(second, 1), (first, 2)])


@check(
    Kind.STATE, "state.checkpoint.copy_on_donate", Level.HOSTILE, cases=by_kind, needs={"checkpoints": True}, cost=0.31
)
def copy_on_donate(run: Run) -> None:
    """A checkpoint is a copy: the original goes on and the copy stays, bit for bit, and the other way round."""
    session = hostile(run)
    original, neighbour = session.request(2), session.request(1)
    session.feed([(original, 5), (neighbour, 3)])
    kept = session.copy(original, 4, "checkpoint in slot 4")
    session.step([(original, 1), (neighbour, 1)])
    session.step([(original, 1)])
    session.check_state(kept, "after its original has gone on")
    session.step([(kept, 1)])
    session.check_state(original, "after its checkpoint has gone on")


@check(Kind.STATE, "state.checkpoint.resume", Level.HOSTILE, cases=by_kind, needs={"checkpoints": True}, cost=0.32)
def resume(run: Run) -> None:
    """From a checkpoint a request goes on as from the start, twice, in slots that held garbage and others' states."""
    session = hostile(run)
    original = session.request(0)
    session.feed([(original, 7)])
    kept = session.copy(original, 3, "checkpoint in slot 3")
    session.feed([(original, 4)])
    again = session.copy(kept, 5, "resumed in slot 5")
    session.feed([(again, 3)])
    finished = session.copy(kept, 0, "resumed in the original's slot")
    session.feed([(finished, 2), (again, 1)])
    session.check_state(kept, "after two requests resumed from it")


@check(
    Kind.STATE,
    "state.checkpoint.layout",
    Level.HOSTILE,
    cases=lambda subject: ({**case, "channel_last": last} for case in by_kind(subject) for last in (False, True)),
    needs={"checkpoints": True},
    cost=0.33,
)
def checkpoint_layout(run: Run) -> None:
    """A copy takes all of the slot's tensors of the layer, and nothing of other layers in the same page."""
    kinds = [run["kind"], *(kind["kind"] for kind in by_kind(run.subject))][:2]
    problems = [problem_of(run, kind, index=index) for index, kind in enumerate(kinds)]
    session = hostile(run, *problems, channel_last=run["channel_last"])
    request = session.request(1)
    session.feed([(request, 5)])
    copied = session.copy(request, 4, "copy in slot 4")
    session.step([(copied, 1)])


@check(
    Kind.STATE,
    "state.checkpoint.after_commit",
    Level.HOSTILE,
    cases=by_kind,
    needs={**NEEDS, "checkpoints": True},
    profile="spec-q",
    cost=0.5,
)
def checkpoint_after_commit(run: Run) -> None:
    """A copy taken after a commit holds the accepted state."""
    session = hostile(run, max_draft_tokens=DRAFTS)
    request = session.request(5)
    session.feed([(request, 3)])
    session.step([(request, 4)])
    session.commit({request.slot: 2})
    copied = session.copy(request, 0, "copy in slot 0")
    session.step([(copied, 1), (request, 1)])
