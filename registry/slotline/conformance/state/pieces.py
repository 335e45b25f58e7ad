"""L2: the division of a prompt and the rest of the batch make no difference."""

from __future__ import annotations

from collections.abc import Iterator

from slotline.conformance.state.problems import by_kind, hostile, most_tokens
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, NotApplicable, Run, check
from slotline.testing.subject import Subject

CUTS = (1, 4, 16, 31, 63, 64, 65, 127, 128, 129)
"""Where a prompt of 140 tokens is cut: around a convolution's width and the chunk sizes that kernels use."""


@check(
    Kind.STATE,
    "state.chunked.equals_one_shot",
    Level.HOSTILE,
    cases=by_kind,
    needs={"query_len": 140},
    profile="prefill",
    cost=1.5,
)
def equals_one_shot(run: Run) -> None:
    """A prompt in two pieces, cut anywhere, gives the outputs and the state of the prompt in one piece."""
    session = hostile(run, num_slots=len(CUTS) + 2)
    tokens = session.tokens(140)
    requests = [session.request(slot + 1, f"prompt cut at {cut}") for slot, cut in enumerate(CUTS)]
    whole = session.request(0, "prompt in one piece")
    session.step_together([(request, tokens, 0, cut) for request, cut in zip(requests, CUTS, strict=True)])
    session.step_together([(whole, tokens, 0, 140), *((request, tokens, request.seen, 140) for request in requests)])


@check(
    Kind.STATE,
    "state.chunked.many_pieces",
    Level.HOSTILE,
    cases=by_kind,
    needs={"query_len": 67},
    profile="prefill",
    cost=0.3,
)
def many_pieces(run: Run) -> None:
    """Several prompts in pieces of unequal length, which end at different places in each batch."""
    session = hostile(run)
    first, second, third = (session.request(slot) for slot in (4, 1, 3))
    session.step([(first, 5), (second, 64), (third, 1)])
    session.step([(third, 67), (first, 59), (second, 1)])
    session.step([(first, 1), (second, 2), (third, 7)])


@check(Kind.STATE, "state.chunked.single_token_extension", Level.HOSTILE, cases=by_kind, profile="prefill", cost=0.25)
def single_token_extension(run: Run) -> None:
    """A prefix, then one more token that is no decode to the scheduler: after 1, 2, 3, 63, 64 and 65 tokens."""
    session = hostile(run, num_slots=8)
    requests = [session.request(slot) for slot in (6, 2, 5, 1, 7, 3)]
    session.feed(list(zip(requests, (1, 2, 3, 63, 64, 65), strict=True)))
    for _ in range(2):
        session.step([(request, 1) for request in requests])


@check(
    Kind.STATE,
    "state.chunked.token_by_token",
    Level.HOSTILE,
    cases=by_kind,
    needs={"query_len": 9},
    profile="mixed",
    cost=0.2,
)
def token_by_token(run: Run) -> None:
    """A prompt in one piece equals the same prompt token by token, together with a request that decodes."""
    session = hostile(run)
    tokens = session.tokens(9)
    whole, single, other = session.request(0, "in one piece"), session.request(2, "by tokens"), session.request(5)
    session.step([(other, 2)])
    for t in range(9):
        session.step_together([(other, session.tokens(1, seed=100 + t), 0, 1), (single, tokens, t, t + 1)])
    session.step_together([(whole, tokens, 0, 9)])


def _mixed_cases(subject: Subject) -> Iterator[Case]:
    if most_tokens(subject) < 2:
        raise NotApplicable("takes one new token of a request in a batch")
    return by_kind(subject)


@check(Kind.STATE, "state.mixed.equals_separate", Level.HOSTILE, cases=_mixed_cases, profile="mixed", cost=0.3)
def mixed_equals_separate(run: Run) -> None:
    """Requests in one batch get what each gets in a batch of its own: both are compared with the truth."""
    counts = [min(count, most_tokens(run.subject)) for count in (1, 7, 2, 33)]
    for together in (True, False):
        session = hostile(run)
        requests = [session.request(slot) for slot in (3, 1, 0, 4)]
        session.feed([(request, 2) for request in requests])
        rows = [(request, session.tokens(count, seed=count)) for request, count in zip(requests, counts, strict=True)]
        for batch in [rows] if together else [[row] for row in rows]:
            session.step_with(batch)
