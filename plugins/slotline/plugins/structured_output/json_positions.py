"""Positions in texts that follow a JSON schema: what has been written, less what has no influence on what may follow.

Texts with the same position may be continued by the same texts. So their grammar states have the same mask, although
nothing of an engine's grammar states is known but their masks.

What is left out of a text depends on the keywords of its schema. A schema with a keyword that is not known here has no
`JsonForm`, and its texts are told apart byte by byte.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from slotline.plugins.structured_output.json_schema import subschemas, targets

_NOTES = frozenset(
    {"$anchor", "$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title"}
    | {"writeOnly"}
)
_STRUCTURE = frozenset(
    {"$defs", "$ref", "additionalProperties", "allOf", "definitions", "items", "properties", "required", "type"}
)
_NUMBERS_OF_NAMES = frozenset({"maxProperties", "minProperties"})
_VALUES = frozenset({"const", "enum"})
_STRINGS, _LENGTHS = frozenset({"format", "pattern"}), frozenset({"maxLength", "minLength"})
_NUMBERS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"})
_COUNTS = frozenset({"maxItems", "minItems", "prefixItems"})
_CHOICES = frozenset({"anyOf", "oneOf"})
_KNOWN = _NOTES | _STRUCTURE | _NUMBERS_OF_NAMES | _VALUES | _STRINGS | _LENGTHS | _NUMBERS | _COUNTS | _CHOICES
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})
_UNKNOWN = dict.fromkeys(_STRINGS | _NUMBERS)
"""Stands for a schema that is not found, with all that may tell values apart."""

_BETWEEN, _WHOLE_STRING, _STRING, _COUNTED_STRING, _WHOLE_SCALAR, _SCALAR = range(6)
_SPACE, _SIMPLE_ESCAPES = b" \t\n\r", b'"\\/bfnrt'
_MARK = b"\x00"  # stands in a string for content that is left out, and can be no part of JSON itself
_PLAIN = (_STRING, b"", 0, b"")  # in a string that is left out, between two characters
_ITEM = b"["  # where a value may stand, if not after a literal or a name that is none, b""

Position = tuple[bytes, tuple[int, ...], int, bytes, int, bytes]
"""Text of finished parts, where the open containers begin in it, and the part that is being written.

That part is white space, a string or another scalar, with its text. Of a string this is what may still be the beginning
of one of the schema's own texts, or the text after the number of characters that is given and left out. The last member
holds the bytes of an incomplete character or escape.
"""
START: Position = (b"", (), _BETWEEN, b"", -1, b"")
Kinds = tuple[int, int]
"""Of strings and of other scalars: how much of them is left out."""


@frozen(kw_only=True)
class JsonForm:
    """What the position in a text leaves out.

    Attributes:
        literals: names of properties and texts of `enum` and `const`, as JSON without quotation marks, sorted.
        kinds: of the values of a literal name, of items and of all other values. Strings that are no literals are left
            out where no expression tells them apart, digits of numbers where no bound does.
        values: leave out values that are complete, but for the names in open objects.
        items: leave out the complete items of open arrays, but for whether there are any.
        members: leave out the complete properties of open objects, but for whether there are any.
    """

    literals: Sequence[bytes]
    kinds: Mapping[bytes, Kinds]
    values: bool
    items: bool
    members: bool

    @classmethod
    def of(cls, schema: str) -> JsonForm | None:
        """Return the form of a schema's texts, or None if a keyword of it is not known."""
        root = json.loads(schema)
        parts = [part for _, part in subschemas(root) if isinstance(part, Mapping)]
        keywords = {keyword for part in parts for keyword in part}
        values = [value for part in parts for value in _listed(part)]
        if not keywords <= _KNOWN or any(isinstance(value, list | Mapping) for value in values):
            return None
        if any(isinstance(part.get("items"), list) or ("$id" in part and part is not root) for part in parts):
            return None
        names = {name for part in parts for name in [*part.get("properties", ()), *part.get("required", ())]}
        erased = not any(map(_is_ambiguous, parts))
        return cls(
            literals=sorted(map(_content, {*names, *(value for value in values if isinstance(value, str))})),
            kinds=_kinds(root, parts),
            values=erased,
            items=erased and not keywords & _COUNTS,
            members=erased and not names and not keywords & _NUMBERS_OF_NAMES,
        )

    @property
    def start(self) -> Position:
        """The position of a text without output."""
        return START

    def begins_literal(self, content: bytes) -> bool:
        """Return True if some literal begins with the content of a string."""
        place = bisect_left(self.literals, content)
        return place < len(self.literals) and self.literals[place].startswith(content)

    def after(self, position: Position, text: bytes) -> Position | None:
        """Return the position after more text. None if the whole is no beginning of JSON."""
        if position[2:] == _PLAIN and text.isascii() and b'"' not in text and b"\\" not in text:
            return position
        at: Position | None = position
        for byte in text:
            if at is None:
                return None
            kind = at[2]
            if _BETWEEN < kind < _WHOLE_SCALAR:
                at = self._in_string(at, byte)
            elif kind >= _WHOLE_SCALAR and byte not in b" \t\n\r,]}":
                at = (*at[:3], _scalar(kind, at[3], byte), -1, b"")
            else:
                at = self._between(at, byte)
        return at

    def _between(self, at: Position, byte: int) -> Position | None:
        done, stack, kind, part, _, _ = at
        if kind >= _WHOLE_SCALAR:
            done += b"v" if self.values else part
        if byte in _SPACE:
            return done, stack, _BETWEEN, b" ", -1, b""
        if byte in b"{[":
            return done + bytes((byte,)), (*stack, len(done)), _BETWEEN, b"", -1, b""
        if byte in b"}]":
            if not stack:
                return None
            done = done[: stack[-1]] + b"v" if self.values else done + bytes((byte,))
            return done, stack[:-1], _BETWEEN, b"", -1, b""
        if byte in b",:":
            if byte == 0x2C and stack and (self.items if done[stack[-1]] == 0x5B else self.members):
                done = done[: stack[-1] + 1]
            return done + bytes((byte,)), stack, _BETWEEN, b"", -1, b""
        string, scalar = self._kinds_at(done, stack)
        if byte == 0x22:  # quotation mark
            return done, stack, string, b"", -1, b""
        return done, stack, scalar, _scalar(scalar, b"", byte), -1, b""

    def _kinds_at(self, done: bytes, stack: Sequence[int]) -> Kinds:
        """Return the kinds of a value that begins here, or of a name."""
        if _is_name(done, stack):
            return _STRING, _WHOLE_SCALAR
        if not stack or done[stack[-1]] == 0x5B:
            return self.kinds[_ITEM]
        end = begin = len(done) - 2  # behind the name, whose own quotation marks follow backslashes
        while begin > 0 and (done[begin - 1] != 0x22 or _escapes(done[: begin - 1])):
            begin -= 1
        name = done[begin:end]
        return (_WHOLE_STRING, _WHOLE_SCALAR) if b"\\" in name else self.kinds.get(name, self.kinds[b""])

    def _in_string(self, at: Position, byte: int) -> Position:
        done, stack, kind, content, count, partial = at
        if byte == 0x22 and not partial.startswith(b"\\") and not _escapes(content):
            return self._after_string(at)
        if count >= 0:
            return _left_out(at, byte)
        longer = content + bytes((byte,))
        if kind == _WHOLE_STRING or byte == 0x5C or b"\\" in content or self.begins_literal(longer):
            return done, stack, kind, longer, -1, b""
        at = done, stack, kind, b"", 0, b""
        for each in longer:
            at = _left_out(at, each)
        return at

    def _after_string(self, at: Position) -> Position:
        done, stack, _, content, count, _ = at
        if self.values and not _is_name(done, stack):
            return done + b"v", stack, _BETWEEN, b"", -1, b""
        text = content if count < 0 else _MARK + b"%d" % count + content
        return done + b'"' + text + b'"', stack, _BETWEEN, b"", -1, b""


FREE_OBJECTS = JsonForm(
    literals=(), kinds=dict.fromkeys((b"", _ITEM), (_STRING, _SCALAR)), values=True, items=True, members=True
)
"""Form of texts that are any JSON object."""


def _scalar(kind: int, part: bytes, byte: int) -> bytes:
    """Return a scalar with one more byte, of a number as the shortest of its kind."""
    if kind == _WHOLE_SCALAR or not 0x30 <= byte <= 0x39:
        return part + bytes((byte,))
    if part[-1:].isdigit():
        return part
    whole = not part or part == b"-"
    return part + (b"1" if whole and byte != 0x30 else b"0")


def _left_out(at: Position, byte: int) -> Position:
    """Return the position after a byte in a string that is no literal."""
    done, stack, kind, content, count, partial = at
    if content:  # an escape that stays as it is, and what follows
        return done, stack, kind, content + bytes((byte,)), count, partial
    partial += bytes((byte,))
    if partial[0] != 0x5C:
        if len(partial) == character_length(partial[0]):
            count, partial = count + (kind == _COUNTED_STRING), b""
    elif len(partial) == 2 and kind == _STRING and byte in _SIMPLE_ESCAPES:
        partial = b""
    elif len(partial) == 2:
        content, partial = partial, b""
    return done, stack, kind, content, count, partial


def _kinds(root: Any, parts: Sequence[Mapping[str, Any]]) -> dict[bytes, Kinds]:
    """Return how much is left out of the values after each name, of items and of others, by all schemas for them."""
    others = [part["additionalProperties"] for part in parts if "additionalProperties" in part]
    items = [root, *(part["items"] for part in parts if "items" in part)]
    items += [item for part in parts for item in part.get("prefixItems", ())]
    named: dict[str, list[Any]] = {}
    for part in parts:
        for name, schema in part.get("properties", {}).items():
            named.setdefault(name, []).append(schema)
    found = {_content(name): _kinds_of([*schemas, *others], root) for name, schemas in named.items()}
    return {**found, b"": _kinds_of(others, root), _ITEM: _kinds_of(items, root)}


def _kinds_of(schemas: Sequence[Any], root: Any) -> Kinds:
    """Return how much is left out of values that follow any of some schemas."""
    known, left = {}, list(schemas)
    while left:
        schema = left.pop()
        if not isinstance(schema, Mapping) or id(schema) in known:
            continue
        known[id(schema)] = schema
        left += [branch for keyword in (*_CHOICES, "allOf") for branch in schema.get(keyword, ())]
        if (reference := schema.get("$ref", "#")) == "#":
            left += [root] if "$ref" in schema else []
        else:
            left += [target for _, target in targets(reference, [root])] or [_UNKNOWN]
    keywords = {keyword for schema in known.values() for keyword in schema}
    numbers = any(_is_number(value) for schema in known.values() for value in _listed(schema))
    string = _WHOLE_STRING if keywords & _STRINGS else _COUNTED_STRING if keywords & _LENGTHS else _STRING
    return string, _WHOLE_SCALAR if numbers or keywords & _NUMBERS else _SCALAR


def _escapes(content: bytes) -> bool:
    """Return True if the byte after a string's content is escaped."""
    return (len(content) - len(content.rstrip(b"\\"))) % 2 == 1


def _is_name(done: bytes, stack: Sequence[int]) -> bool:
    """Return True if a string that follows is a property's name."""
    return bool(stack) and done[stack[-1]] == 0x7B and done[-1] in b"{,"


def character_length(first: int) -> int:
    """Return the number of bytes of a character in UTF-8, by its first byte."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _listed(part: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema compares with."""
    listed = part.get("enum")
    return [*(listed if isinstance(listed, list) else ()), *([part["const"]] if "const" in part else ())]


def _is_ambiguous(part: Mapping[str, Any]) -> bool:
    """Return True if an object or array may follow one of several schemas, so that its values decide on the others."""
    return any(sum(not _is_scalar(branch) for branch in part.get(keyword, ())) > 1 for keyword in _CHOICES)


def _is_scalar(branch: Any) -> bool:
    """Return True for a schema that allows no objects and no arrays."""
    if not isinstance(branch, Mapping):
        return False
    kinds = branch.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    return bool(_VALUES & set(branch)) or (bool(kinds) and kinds <= _SCALARS)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _content(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False)[1:-1].encode()
