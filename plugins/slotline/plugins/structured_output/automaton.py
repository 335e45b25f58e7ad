"""Automata of regular expressions and of rules in GBNF, by which texts that can go on alike are told.

The parsers take what XGrammar and llguidance read in the same way, and nothing else. Where this is not certain
of a character, as of letters that are not ASCII in a word, it is in doubt: `CharacterSet.has` then returns None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

_MOST_NODES = 4096
_DEEPEST = 64
_CLASSES = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": ((0x09, 0x0D), (0x20, 0x20)),
}
_CONTROLS = {"n": 0x0A, "t": 0x09, "r": 0x0D}
_LINE_ENDS = frozenset((0x0A, 0x0D, 0x85, 0x2028, 0x2029))
_SEPARATORS = frozenset(range(0x1C, 0x20))
_TIMES = re.compile(r"\{(\d{1,6})(,(\d{1,6})?)?\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_IS = re.compile(r"\s*::=")
_BLANK = re.compile(r"(?:\s|#[^\n\r]*)+")
_NOTHING = re.compile("")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")


class UnknownNotationError(Exception):
    """What this module does not read, or too much of it."""


@frozen
class CharacterSet:
    """Set of characters.

    Attributes:
        ranges: code points, ends included.
        negated: whether these are the characters outside of it.
        named: whether it has digits, spaces or a word's characters as such, which may be others than those of ASCII.
        dot: whether it is `.`, which may have line ends or not.
    """

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False
    named: bool = False
    dot: bool = False

    def has(self, code: int) -> bool | None:
        """Return whether a code point belongs to the set. None if engines may differ on it."""
        if code == 0 or (self.dot and code in _LINE_ENDS):
            return None
        inside = any(low <= code <= high for low, high in self.ranges)
        if self.named and not inside and (code >= 0x80 or code in _SEPARATORS):
            return None
        return inside != self.negated


@frozen
class Call:
    """Reference to a rule."""

    name: str


@frozen
class Chain:
    """Parts one behind the other."""

    parts: tuple[Tree, ...]


@frozen
class Either:
    """One of some branches."""

    branches: tuple[Tree, ...]


@frozen
class Times:
    """A part several times, without end if `most` is None."""

    part: Tree
    least: int
    most: int | None


Tree = CharacterSet | Call | Chain | Either | Times
_ANY = CharacterSet((), negated=True, dot=True)


@define(eq=False)
class Automaton:
    """Nodes with edges for characters, for nothing and for rules, by the number of the node."""

    characters: list[list[tuple[CharacterSet, int]]] = field(factory=list)
    nothing: list[list[int]] = field(factory=list)
    calls: list[list[tuple[str, int]]] = field(factory=list)

    def node(self) -> int:
        """Return a new node.

        Raises:
            UnknownNotationError: if there are too many.
        """
        if len(self.nothing) == _MOST_NODES:
            raise UnknownNotationError("too many nodes")
        self.characters.append([])
        self.nothing.append([])
        self.calls.append([])
        return len(self.nothing) - 1

    def add(self, tree: Tree, begin: int) -> int:
        """Add the ways through a tree from a node. Return the node at their end."""
        if isinstance(tree, Chain):
            for part in tree.parts:
                begin = self.add(part, begin)
            return begin
        if isinstance(tree, Times):
            return self._repeat(tree, begin)
        end = self.node()
        if isinstance(tree, CharacterSet):
            self.characters[begin].append((tree, end))
        elif isinstance(tree, Call):
            self.calls[begin].append((tree.name, end))
        else:
            for branch in tree.branches:
                own = self.node()
                self.nothing[begin].append(own)
                self.nothing[self.add(branch, own)].append(end)
        return end

    def _repeat(self, tree: Times, begin: int) -> int:
        for _ in range(tree.least):
            begin = self.add(tree.part, begin)
        if tree.most is None:
            loop = self.node()
            self.nothing[begin].append(loop)
            self.nothing[self.add(tree.part, loop)].append(loop)
            end = self.node()
            self.nothing[loop].append(end)
            return end
        skipped = [begin]
        for _ in range(tree.most - tree.least):
            begin = self.add(tree.part, begin)
            skipped.append(begin)
        end = self.node()
        for node in skipped:
            self.nothing[node].append(end)
        return end

    def reach(self, nodes: Sequence[int]) -> set[int]:
        """Return the nodes that are reached without a character and without a rule."""
        found, todo = set(nodes), list(nodes)
        while todo:
            for node in self.nothing[todo.pop()]:
                if node not in found:
                    found.add(node)
                    todo.append(node)
        return found


class _Scanner:
    """Place in a notation."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    @property
    def next(self) -> str:
        """The next character, "" at the end."""
        return self.text[self.at : self.at + 1]

    def take(self, expected: str = "") -> str:
        """Take the next character.

        Raises:
            UnknownNotationError: if there is none, or another than `expected`.
        """
        character = self.next
        if not character or (expected and character != expected):
            raise UnknownNotationError(f"at {self.at}")
        self.at += 1
        return character

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Take what matches here."""
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def code(self, digits: int) -> int:
        """Take hexadecimal digits.

        Raises:
            UnknownNotationError: if there are fewer, or they mean no character.
        """
        written = self.text[self.at : self.at + digits]
        if len(written) < digits or not all(digit in "0123456789abcdefABCDEF" for digit in written):
            raise UnknownNotationError(f"at {self.at}")
        self.at += digits
        code = int(written, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000 or (digits == 2 and code >= 0x80):
            raise UnknownNotationError(f"at {self.at}")  # \x80 is a byte to some
        return code

    def nested(self) -> None:
        """Count a level.

        Raises:
            UnknownNotationError: if there are too many.
        """
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UnknownNotationError("nested too deeply")

    def times(self, part: Tree) -> Tree:
        """Return a part with the quantifier behind it.

        Raises:
            UnknownNotationError: if another follows: it may mean the first one that fits, or no way back.
        """
        sign = self.next
        if sign and sign in "*+?":
            self.at += 1
            least, most = (1 if sign == "+" else 0), (1 if sign == "?" else None)
        elif found := self.match(_TIMES):
            least = int(found[1])
            most = least if found[2] is None else None if found[3] is None else int(found[3])
            if most is not None and most < least:
                raise UnknownNotationError(f"at {self.at}")
        else:
            return part
        if self.next and self.next in "*+?{":
            raise UnknownNotationError(f"at {self.at}")
        return Times(part, least, most)

    def characters(self, escaped: str) -> CharacterSet:
        """Take a set in brackets, behind the first one. `escaped` are classes that may stand in it.

        Raises:
            UnknownNotationError: for sets in sets, and differences.
        """
        negated = self.next == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        named = False
        while self.next != "]" or not ranges:
            if self.next in "[]" or self.text[self.at : self.at + 2] in ("&&", "--", "~~"):
                raise UnknownNotationError(f"at {self.at}")
            first = self.next == "-"
            low = self.one(escaped)
            if isinstance(low, str):
                ranges += _CLASSES[low]
                named = True
                if self.next == "-":
                    raise UnknownNotationError(f"at {self.at}")
                continue
            high = low
            if self.next == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                end = self.one("")
                if first or isinstance(end, str) or end < low:
                    raise UnknownNotationError(f"at {self.at}")
                high = end
            elif first and ranges and self.next != "]":
                raise UnknownNotationError(f"at {self.at}")
            ranges.append((low, high))
        self.at += 1
        return CharacterSet(tuple(ranges), negated=negated, named=named)

    def one(self, escaped: str) -> int | str:
        """Take one character, maybe escaped. Return its code point, or the letter of a class among `escaped`.

        Raises:
            UnknownNotationError: for other escapes.
        """
        character = self.take()
        if character != "\\":
            return ord(character)
        letter = self.take()
        if letter in escaped:
            return letter
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter in "xuU":
            return self.code({"x": 2, "u": 4, "U": 8}[letter])
        if letter.isalnum() or not letter.isascii() or letter < " ":
            raise UnknownNotationError(f"at {self.at}")
        return ord(letter)


def expression(text: str) -> Tree:
    """Return the tree of a regular expression that matches whole texts.

    Raises:
        UnknownNotationError: for what engines read in different ways, or not at all.
    """
    scanner = _Scanner(text)
    anchored = [text.startswith("^"), text.endswith("$") and not text.endswith("\\$")]
    scanner.at += anchored[0]
    scanner.text = text[: len(text) - anchored[1]]
    tree = _branches(scanner)
    if scanner.next or (any(anchored) and isinstance(tree, Either)):
        raise UnknownNotationError(f"at {scanner.at}")
    return tree


def _branches(scanner: _Scanner) -> Tree:
    return _either(scanner, _atom, _NOTHING, lambda _: False)


def _either(
    scanner: _Scanner, part: Callable[[_Scanner], Tree], blank: re.Pattern[str], ends: Callable[[_Scanner], bool]
) -> Tree:
    """Take branches of parts with quantifiers, `blank` behind each, up to where they end."""
    scanner.nested()
    branches: list[Tree] = []
    while True:
        parts: list[Tree] = []
        while scanner.next and scanner.next not in "|)" and not ends(scanner):
            parts.append(scanner.times(part(scanner)))
            scanner.match(blank)
        branches.append(Chain(tuple(parts)))
        if scanner.next != "|":
            break
        scanner.at += 1
        scanner.match(blank)
    scanner.depth -= 1
    return branches[0] if len(branches) == 1 else Either(tuple(branches))


def _atom(scanner: _Scanner) -> Tree:
    if scanner.next == "(":
        if scanner.match(_GROUP) is None:
            raise UnknownNotationError(f"at {scanner.at}")
        tree = _branches(scanner)
        scanner.take(")")
        return tree
    if (found := _set(scanner, "dws")) is not None:
        return found
    if scanner.next in "*+?{}]^$/":
        raise UnknownNotationError(f"at {scanner.at}")
    one = scanner.one("dwsDWS")
    if isinstance(one, int):
        return CharacterSet(((one, one),))
    return CharacterSet(_CLASSES[one.lower()], negated=one.isupper(), named=True)


def _set(scanner: _Scanner, escaped: str) -> CharacterSet | None:
    """Take a set in brackets or the dot, if one comes."""
    if scanner.next not in ("[", "."):
        return None
    return scanner.characters(escaped) if scanner.take() == "[" else _ANY


def rules(text: str) -> dict[str, Tree]:
    """Return the trees of a grammar's rules in GBNF, by name.

    Raises:
        UnknownNotationError: for what engines read in different ways, or not at all.
    """
    scanner, found = _Scanner(text), dict[str, Tree]()
    scanner.match(_BLANK)
    while scanner.next:
        name = scanner.match(_NAME)
        if name is None or name[0] in found or scanner.match(_IS) is None:
            raise UnknownNotationError(f"at {scanner.at}")
        scanner.match(_BLANK)
        found[name[0]] = _alternatives(scanner)
    if "root" not in found:
        raise UnknownNotationError("no rule root")
    return found


def _alternatives(scanner: _Scanner) -> Tree:
    return _either(scanner, _element, _BLANK, _begins_rule)


def _begins_rule(scanner: _Scanner) -> bool:
    name = _NAME.match(scanner.text, scanner.at)
    return name is not None and _IS.match(scanner.text, name.end()) is not None


def _element(scanner: _Scanner) -> Tree:
    if scanner.next == "(":
        scanner.at += 1
        scanner.match(_BLANK)
        tree = _alternatives(scanner)
        scanner.take(")")
        return tree
    if (found := _set(scanner, "")) is not None:
        return found
    if scanner.next == '"':
        scanner.at += 1
        parts = []
        while scanner.next != '"':
            code = scanner.one("")
            assert isinstance(code, int)  # no classes were named
            parts.append(CharacterSet(((code, code),)))
        scanner.at += 1
        return Chain(tuple(parts))
    if name := scanner.match(_NAME):
        return Call(name[0])
    raise UnknownNotationError(f"at {scanner.at}")
