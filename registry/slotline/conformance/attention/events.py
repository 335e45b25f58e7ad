"""Backends that hear of blocks: what they keep for each block is right after every way a block changes hands."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, NotApplicable, Run, check
from slotline.testing.environments.attention_events import Story
from slotline.testing.subject import Subject

FEW, MANY = 6, 100
"""Blocks of a text for exact backends, and for those that may leave blocks out."""


def by_needle(subject: Subject) -> list[Case]:
    """Return blocks where the key lies that decides the last output: early, in the middle and late."""
    if not subject.capabilities.block_events:
        raise NotApplicable("the backend does not hear of blocks: block_events is not declared")
    count = FEW if subject.capabilities.exact.support else MANY
    return [{"blocks": count, "needle": block} for block in (1, count // 2, count - 2)]


def _story(run: Run) -> tuple[Story, int]:
    """Return a story and the position of needles."""
    story = Story(run, run["blocks"])
    return story, run["needle"] * story.size + story.size // 2


@check(Kind.ATTENTION, "attention.events.given", Level.STATEFUL, cases=by_needle)
def given(run: Run) -> None:
    """Blocks that another request gets to write to are new: nothing of their old keys is remembered."""
    story, place = _story(run)
    held = [*story.blocks(0), *story.last(0)]
    story.tell(given=held)
    story.read(0, story.text(None))
    for _ in range(2):
        text = story.text(place)
        story.tell(returned=held, given=story.blocks(0))
        story.read(0, text)
        story.tell(given=story.last(0))
        story.decode(0, text)


@check(Kind.ATTENTION, "attention.events.restored", Level.STATEFUL, cases=by_needle)
def restored(run: Run) -> None:
    """Blocks of a cached prefix come back with the contents that they had, also after others have run."""
    story, place = _story(run)
    text, other = story.text(place), story.text(place)
    story.tell(given=story.blocks(0))
    story.read(0, text)
    story.tell(returned=story.blocks(0), given=story.blocks(1))
    story.read(1, other)
    for _ in range(2):
        story.tell(restored=story.blocks(0), given=story.last(0))
        story.decode(0, text)
        story.tell(returned=[*story.blocks(0), *story.last(0)], given=story.last(1))
        story.decode(1, other)
        story.tell(returned=story.last(1))


@check(Kind.ATTENTION, "attention.events.loaded", Level.STATEFUL, cases=by_needle)
def loaded(run: Run) -> None:
    """Blocks that a connector has filled are read anew, whatever was known of them before."""
    story, place = _story(run)
    story.tell(given=story.blocks(1))
    story.read(1, story.text(None))
    for step, row in enumerate((0, 1, 0, 1)):
        text = story.text((place + 2 * step * story.size) % (story.length - 1))
        story.put(row, text)
        held = [*story.blocks(row), *(story.last(row) if step > 1 else ())]
        story.tell(returned=held if step else (), loaded=story.blocks(row), given=story.last(row))
        story.decode(row, text)


@check(Kind.ATTENTION, "attention.events.same_step", Level.STATEFUL, cases=by_needle)
def same_step(run: Run) -> None:
    """A block that is returned and taken again between two steps counts as taken: `returned` comes first."""
    story, place = _story(run)
    text = story.text(place)
    story.tell(given=story.blocks(0))
    story.read(0, text)
    story.tell(given=story.last(0))
    story.decode(0, text)
    held = [*story.blocks(0), *story.last(0)]
    story.tell(returned=held, restored=story.blocks(0), given=story.last(0))
    story.decode(0, text)
    filled = story.text(place)
    story.put(0, filled)
    story.tell(returned=held, loaded=story.blocks(0), given=story.last(0))
    story.decode(0, filled)


@check(Kind.ATTENTION, "attention.events.shared_prefix", Level.STATEFUL, cases=by_needle)
def shared_prefix(run: Run) -> None:
    """A request that gets a part of its blocks from the cache and writes the others has the contents of both."""
    story, place = _story(run)
    half = run["blocks"] // 2
    first = story.text(place)
    story.tell(given=[*story.blocks(0), *story.last(0)])
    story.read(0, first)
    for _ in range(2):
        text = story.continued(first, place, half * story.size)
        story.tell(
            returned=[*story.blocks(0), *story.last(0)],
            restored=story.blocks(0, 0, half),
            given=[*story.blocks(0, half), *story.last(0)],
        )
        story.read(0, text, half * story.size)
        story.decode(0, text)
