"""Positions in texts of structural tags, see `MaskCache`: in free text, in a tag's begin, in its JSON, in its end."""

from __future__ import annotations

import json

from attrs import frozen

from slotline.plugins.structured_output.automaton import UnknownNotationError
from slotline.plugins.structured_output.json_positions import START, JsonForm, Position, character_length
from slotline.plugins.structured_output.structural_tags import Structure, demands, structures

_SPACE, _OPENS, _CLOSES = b" \t\n\r", b"{[", b"}]"


@frozen
class Free:
    """In free text.

    Attributes:
        end: of the text, which may become a trigger.
        character: bytes of one that is not whole.
        tagged: whether a tag came before.
    """

    end: bytes
    character: bytes
    tagged: bool


@frozen
class Beginning:
    """In a tag's begin, of which `text` is there."""

    text: bytes


@frozen
class Inside:
    """In the JSON of the tag with number `tag`."""

    tag: int
    position: Position


@frozen
class Ending:
    """Behind the JSON of a tag, with what was written since."""

    tag: int
    text: bytes


@frozen
class Over:
    """Behind the last tag."""


Place = Free | Beginning | Inside | Ending | Over


class TagForm:
    """Positions in texts of a structural tag.

    Raises:
        UnknownNotationError: if triggers or begins hold each other, if a tag has no end, or if the JSON of one is not
            told by `JsonForm`.
    """

    def __init__(self, text: str) -> None:
        found = structures(text)
        self._stops = demands(text).stop_after_first
        self._triggers = sorted({one.trigger.encode() for one in found})
        self._begins = {one.begin.encode(): number for number, one in enumerate(found)}
        self._ends = [one.end.encode() for one in found]
        self._forms = [_form(one) for one in found]
        self._parts = {trigger[:end] for trigger in self._triggers for end in range(len(trigger))}
        if len(self._begins) < len(found) or _hold_each_other(self._triggers) or _begin_each_other([*self._begins]):
            raise UnknownNotationError("tags begin alike")
        if not all(self._ends) or any(self._tail(end) for end in self._ends):
            raise UnknownNotationError("where a tag ends is not certain")
        self.start: Place = Free(b"", b"", tagged=False)

    def after(self, position: Place, text: bytes) -> Place | None:
        """Return the position after more text. None if it cannot be told."""
        if isinstance(position, Free) and not position.end + position.character and self._is_plain(text):
            return position
        at: Place | None = position
        for byte in text:
            if isinstance(at, Free):
                at = self._in_free_text(at, byte)
            elif isinstance(at, Beginning):
                at = self._in_begin(at.text + bytes((byte,)))
            elif isinstance(at, Inside):
                at = self._inside(at, byte)
            elif isinstance(at, Ending):
                at = self._in_end(at.tag, at.text + bytes((byte,)))
            else:
                return None
        return at

    def _is_plain(self, text: bytes) -> bool:
        """Return True for whole characters of which none begins a trigger."""
        return text.isascii() and not any(trigger[0] in text for trigger in self._triggers)

    def _in_free_text(self, at: Free, byte: int) -> Place | None:
        text, character = at.end + bytes((byte,)), at.character + bytes((byte,))
        if (found := next((trigger for trigger in self._triggers if text.endswith(trigger)), None)) is not None:
            return self._in_begin(found)
        whole = len(character) == character_length(character[0])
        return Free(self._tail(text), b"" if whole else character, at.tagged)

    def _in_begin(self, text: bytes) -> Place | None:
        if (tag := self._begins.get(text)) is not None:
            return Inside(tag, START)
        return Beginning(text) if any(begin.startswith(text) for begin in self._begins) else None

    def _inside(self, at: Inside, byte: int) -> Place | None:
        if at.position == START and byte not in _OPENS and byte not in _SPACE:
            return None  # where a number ends is not certain
        before = START if at.position[:2] == START[:2] and byte in _SPACE else at.position
        position = self._forms[at.tag].after(before, bytes((byte,)))
        if position is None:
            return None
        if byte in _CLOSES and not position[1] and before[1]:
            return Ending(at.tag, b"")
        return Inside(at.tag, position)

    def _in_end(self, tag: int, text: bytes) -> Place | None:
        end = self._ends[tag]
        if text.endswith(end) and not text[: -len(end)].strip(_SPACE):
            return Over() if self._stops else Free(b"", b"", tagged=True)
        return Ending(tag, text)

    def _tail(self, text: bytes) -> bytes:
        """Return the longest end of a text that begins a trigger."""
        return next(text[i:] for i in range(len(text) + 1) if text[i:] in self._parts)


def _form(structure: Structure) -> JsonForm:
    form = JsonForm.of(json.dumps(structure.schema))
    if form is None:
        raise UnknownNotationError("a schema's texts are not told apart by places")
    return form


def _hold_each_other(texts: list[bytes]) -> bool:
    return any(one in other for one in texts for other in texts if one is not other)


def _begin_each_other(texts: list[bytes]) -> bool:
    return any(other.startswith(one) for one in texts for other in texts if one is not other)
