"""Steps as a drafter with blocks or states observes them: chunks, rejected drafts, preemption, requests that left."""

from __future__ import annotations

from slotline.conformance.drafter.comparing import same_drafts
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.drafter import Request, World, is_shown_steps, random_request, world_of


def _must_observe(run: Run) -> None:
    """Skip a check for drafters that observe no steps, or that the suite cannot show any."""
    declared = run.subject.capabilities
    if not declared.needs_computed:
        raise NotApplicable("needs_computed is not declared")
    if not is_shown_steps(declared):
        raise NotApplicable("block_attention and state are not declared: only an engine can give the rest")


def _requests(run: Run) -> dict[int, Request]:
    rng = run.rng
    return {row: random_request(rng, length=length) for row, length in enumerate((3, 9, 17, 26, 33, 40))}


@check(Kind.DRAFTER, "drafter.block.declared", Level.CONTRACT)
def block_declared(run: Run) -> None:
    """A drafter that declares blocks has layers of its own to compute them with."""
    declared = run.subject.capabilities
    if declared.block_attention == "none":
        raise NotApplicable("block_attention is not declared")
    if not declared.needs_kv_group:
        raise Failed("block_attention is declared without needs_kv_group: blocks are of the drafter's own layers")


@check(Kind.DRAFTER, "drafter.state.declared", Level.CONTRACT)
def state_declared(run: Run) -> None:
    """A drafter that keeps a state hears of preempted rows, and sees the tokens of steps without a proposal."""
    declared = run.subject.capabilities
    if declared.state == "none":
        raise NotApplicable("state is not declared")
    if not (declared.needs_computed or declared.needs_history):
        raise Failed("state is declared, and neither needs_computed nor needs_history: tokens of some steps are missed")
    if not callable(getattr(World(run.subject).drafter, "preempt", None)):
        raise Failed("state is declared, and the drafter has no method preempt(row)")


@check(Kind.DRAFTER, "drafter.steps.chunks", Level.HOSTILE, cost=0.1)
def steps_chunks(run: Run) -> None:
    """A history that is computed in chunks, with steps of some of the rows, gives the draft of one step."""
    _must_observe(run)
    requests = _requests(run)
    expected = world_of(run.subject, requests).propose(range(6))
    for seed in range(3):
        found = world_of(run.subject, requests, garbage="garbage", seed=seed).propose(range(6))
        same_drafts(requests, expected, found, "computed in chunks instead of at once")


@check(Kind.DRAFTER, "drafter.steps.rejected", Level.HOSTILE, cost=0.2)
def steps_rejected(run: Run) -> None:
    """Drafts that a step computed and that fell leave no trace in the proposals after it."""
    _must_observe(run)
    rng, world = run.rng, world_of(run.subject, _requests(run), garbage="garbage")
    for _ in range(4):
        world.propose(range(6))
        for row in range(6):
            world.requests[row] = world.requests[row].then(rng.randrange(32) for _ in range(rng.randint(1, 4)))
        _compare(run, world, "after steps whose drafts fell")


@check(Kind.DRAFTER, "drafter.steps.preempted", Level.HOSTILE, cost=0.2)
def steps_preempted(run: Run) -> None:
    """A preempted request is computed again on its row, and gets the draft of a new drafter; so do the others."""
    _must_observe(run)
    rng, world = run.rng, world_of(run.subject, _requests(run), garbage="garbage")
    for victim in (2, 5, 2):
        world.propose(range(6))
        world.preempt(victim)
        for row in range(6):
            world.requests[row] = world.requests[row].then([rng.randrange(32)])
        _compare(run, world, f"after the request of row {victim} was preempted")


@check(Kind.DRAFTER, "drafter.steps.late", Level.HOSTILE, cost=0.2)
def steps_late(run: Run) -> None:
    """The last step of a request is observed after its release, and changes nothing for others or the next one."""
    _must_observe(run)
    rng, world = run.rng, world_of(run.subject, _requests(run), garbage="garbage")
    for row in (4, 0, 4):
        world.propose(range(6))
        for other in range(6):
            world.requests[other] = world.requests[other].then([rng.randrange(32)])
        world.release(row)
        world.admit(row, random_request(rng, length=12))
        _compare(run, world, f"after the last step of the request that left row {row}")


def _compare(run: Run, world: World, what: str) -> None:
    """Compare the proposals with those of a new drafter that sees each history at once."""
    found = world.propose(range(6))
    expected = world_of(run.subject, dict(world.requests)).propose(range(6))
    same_drafts(world.requests, expected, found, what)
