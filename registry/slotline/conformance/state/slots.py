"""L2: slots, padding and garbage. Unwritten memory is NaN here, and writes to foreign slots are detected."""

from __future__ import annotations

from slotline.conformance.state.problems import by_kind, hostile, most_tokens, problem_of
from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, Run, check


@check(Kind.STATE, "state.slots.permuted", Level.HOSTILE, cases=by_kind, profile="mixed", cost=0.04)
def permuted(run: Run) -> None:
    """Rows of a batch have another order than their slots, and another one in each step."""
    session = hostile(run)
    requests = [session.request(slot) for slot in (4, 0, 5, 2)]
    session.feed([(request, 3 + index) for index, request in enumerate(requests)])
    rng = run.rng
    for _ in range(4):
        rng.shuffle(requests)
        session.step([(request, 1) for request in requests])


@check(Kind.STATE, "state.slots.subset", Level.HOSTILE, cases=by_kind, profile="decode", cost=0.05)
def subset(run: Run) -> None:
    """Requests that are not in a batch keep their state bit for bit, and go on from it later."""
    session = hostile(run)
    requests = [session.request(slot) for slot in (1, 5, 3)]
    session.feed([(request, 4) for request in requests])
    session.step([(requests[1], 1)])
    session.step([(requests[2], 1), (requests[0], 1)])
    session.step([(request, 1) for request in requests])


@check(Kind.STATE, "state.slots.high", Level.HOSTILE, cases=by_kind, profile="decode", cost=0.07)
def high(run: Run) -> None:
    """Slot numbers beyond one signed or unsigned byte."""
    session = hostile(run, num_slots=300)
    requests = [session.request(slot) for slot in (299, 127, 128, 43, 255)]
    session.feed([(request, 2) for request in requests])
    session.step([(request, 1) for request in requests])


@check(Kind.STATE, "state.slots.garbage_start", Level.HOSTILE, cases=by_kind, profile="prefill", cost=0.03)
def garbage_start(run: Run) -> None:
    """Without an initial state a request starts from zeros, although its slot holds NaN, also with a single token."""
    session = hostile(run)
    first, second = session.request(2), session.request(0)
    session.feed([(first, 5), (second, 1)])
    session.step([(first, 1), (second, 1)])


@check(Kind.STATE, "state.slots.reused", Level.HOSTILE, cases=by_kind, profile="prefill", cost=0.06)
def reused(run: Run) -> None:
    """A new request in the slot of a finished one sees nothing of it, while its neighbours go on."""
    session = hostile(run)
    finished, neighbour = session.request(3), session.request(4)
    session.feed([(finished, 6), (neighbour, 5)])
    session.step([(finished, 1), (neighbour, 1)])
    successor = session.request_in_place(3, "successor in slot 3")
    session.feed([(neighbour, 1), (successor, 4)])
    session.step([(successor, 1), (neighbour, 1)])


@check(Kind.STATE, "state.slots.third", Level.HOSTILE, cases=by_kind, profile="prefill", cost=0.1)
def third(run: Run) -> None:
    """The third request of a slot and those after it, with equal tokens and others, see nothing of those before."""
    session = hostile(run)
    neighbour, count = session.request(4), min(3, most_tokens(run.subject))
    session.feed([(neighbour, 3)])
    session.request(3)
    for number, seed in enumerate((5, 5, 5, 6, 5), 1):
        successor = session.request_in_place(3, f"request {number} in slot 3")
        session.step_with([(successor, session.tokens(count, seed)), (neighbour, session.tokens(1, 100 + number))])
        session.step([(neighbour, 1), (successor, 1)])


@check(Kind.STATE, "state.padding.rows", Level.HOSTILE, cases=by_kind, profile="mixed", cost=0.08)
def padding_rows(run: Run) -> None:
    """Rows with slot -1, with and without tokens, at the front, in the middle and at the end, change no slot."""
    session = hostile(run)
    longer = min(3, most_tokens(run.subject))
    first, second = session.request(5), session.request(0)
    session.step([(None, 1), (first, longer), (None, longer), (None, 0), (second, 1), (None, 1)])
    session.step([(first, 1), (second, 1), (None, 1), (None, 1)])
    session.step([(None, 1), (second, longer), (None, 0)])
    session.step([(None, 1), (None, 1)])
    session.step([(second, 1), (None, 0), (first, 1)])


@check(Kind.STATE, "state.padding.tensors", Level.HOSTILE, cases=by_kind, profile="mixed", cost=0.09)
def padding_tensors(run: Run) -> None:
    """Tensors longer than the batch says: the further rows have outputs, which are finite, and no state."""
    session = hostile(run, extra_rows=3, extra_tokens=5)
    first, second = session.request(1), session.request(4)
    session.feed([(first, 4), (second, 1)])
    session.step([(second, 1), (first, 1)])


@check(Kind.STATE, "state.zero_tokens.kept", Level.HOSTILE, cases=by_kind, profile="mixed")
def zero_tokens(run: Run) -> None:
    """A row without tokens between others keeps its state bit for bit, and a new one does not change its slot."""
    session = hostile(run)
    requests = [session.request(slot) for slot in (2, 4, 0)]
    late = session.request(5, "request that starts late")
    session.feed([(request, 3) for request in requests])
    session.step([(requests[0], 1), (requests[1], 0), (late, 0), (requests[2], min(2, most_tokens(run.subject)))])
    session.step([(late, 1), (requests[1], 1), (requests[0], 0), (requests[2], 1)])
    session.step([(requests[0], 1), (late, 1)])


@check(
    Kind.STATE,
    "state.layout.page",
    Level.HOSTILE,
    cases=lambda subject: ({**case, "channel_last": last} for case in by_kind(subject) for last in (False, True)),
    profile="mixed",
    cost=0.15,
)
def one_page(run: Run) -> None:
    """Several state tensors in one padded page, row-major or channel-last, and inputs that are strided slices."""
    kinds = [run["kind"], *(kind["kind"] for kind in by_kind(run.subject))]
    problems = [problem_of(run, kind, index=index) for index, kind in enumerate(kinds[:3])]
    session = hostile(run, *problems, channel_last=run["channel_last"])
    first, second = session.request(3), session.request(1)
    session.feed([(first, 6), (second, 2)])
    session.step([(second, 1), (first, 1)])


@check(Kind.STATE, "state.object.reused", Level.HOSTILE, cases=by_kind, profile="mixed", cost=0.12)
def object_reused(run: Run) -> None:
    """One backend object sees batches of any size and order, and no earlier batch influences a later one."""
    session = hostile(run, num_slots=12)
    requests = [session.request(slot) for slot in range(10)]
    session.feed([(request, 1 + request.slot % 4) for request in requests])
    session.step([(requests[7], 1)])
    session.step([(request, 1) for request in reversed(requests)])
    session.feed([(requests[3], 9), (requests[9], 1)])
    session.step([(request, 1) for request in requests[2:5]])
