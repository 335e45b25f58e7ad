"""Positions in texts of regular expressions and of grammars in GBNF, see `MaskCache`.

An expression's position is the set of nodes of its automaton that a text may have reached: all engines read it as a
whole, so what may follow hangs on this set alone.

A grammar is read in several ways. XGrammar looks at all ways through the rules. llguidance cuts the text into the
longest terminals, so that of two ways it may drop one. Therefore a grammar's position is the one way that the last
character left, if it was one, else the last one that was alone with the characters since then. Whatever an engine
drops, it can only have dropped other ways there.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from slotline.plugins.structured_output.automaton import (
    Automaton,
    CharacterSet,
    UnknownNotationError,
    expression,
    rules,
)

Nodes = frozenset[int]
Stack = tuple[Any, ...]
"""Nodes after which a rule goes on, the stack below, and its height. () at the root."""
Way = tuple[Nodes, Stack]
"""Nodes of a rule that a text has reached, and the rules that called it."""
Place = tuple[int, Stack]
_MOST_KNOWN = 1 << 16
_MOST_WAYS = 512
_HIGHEST = 64
_LONGEST = 64
"""Characters without a way that is alone, after which a text is left to the plugin."""


class ExpressionForm:
    """Positions in texts that a regular expression matches as a whole.

    Raises:
        UnknownNotationError: if engines may read the expression in different ways.
    """

    def __init__(self, text: str) -> None:
        self._automaton = Automaton()
        first = self._automaton.node()
        self._end = self._automaton.add(expression(text), first)
        self._known: dict[tuple[Nodes, str], Nodes | None] = {}
        self.start: tuple[Nodes, bytes] = (self._reach([first]), b"")

    def after(self, position: tuple[Nodes, bytes], text: bytes) -> tuple[Nodes, bytes] | None:
        """Return the position after more text. None if it cannot be told."""
        nodes, partial = position
        if (found := _characters(partial + text)) is None:
            return None
        characters, partial = found
        for character in characters:
            following = self._step(nodes, character)
            if following is None:
                return None
            nodes = following
        return nodes, partial

    def _step(self, nodes: Nodes, character: str) -> Nodes | None:
        key = nodes, character
        if key in self._known:
            return self._known[key]
        edges = self._automaton.characters
        found = _taken(((one, end) for node in nodes for one, end in edges[node]), ord(character))
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = following = self._reach(found) if found else None
        return following

    def _reach(self, nodes: Iterable[int]) -> Nodes:
        reached = self._automaton.reach(list(nodes))
        return frozenset(node for node in reached if node == self._end or self._automaton.characters[node])


class RuleForm:
    """Positions in texts of a grammar in GBNF.

    Raises:
        UnknownNotationError: if engines may read the grammar in different ways, or a rule begins with itself.
    """

    def __init__(self, text: str) -> None:
        found = rules(text)
        self._automaton = Automaton()
        self._first = {name: self._automaton.node() for name in found}
        self._ends = {self._automaton.add(tree, self._first[name]) for name, tree in found.items()}
        if any(name not in found for calls in self._automaton.calls for name, _ in calls):
            raise UnknownNotationError("a rule is missing")
        self._reached: dict[Nodes, Nodes] = {}
        self._spreads: dict[Way, frozenset[Place]] = {}
        self._known: dict[tuple[Way, str], frozenset[Place]] = {}
        root: Way = (self._reach(frozenset((self._first["root"],))), ())
        self._places(root, "")
        self.start: tuple[Way, str, bytes] = (root, "", b"")

    def after(self, position: tuple[Way, str, bytes], text: bytes) -> tuple[Way, str, bytes] | None:
        """Return the position after more text. None if it cannot be told."""
        way, since, partial = position
        if (found := _characters(partial + text)) is None:
            return None
        characters, partial = found
        try:
            for character in characters:
                taken = self._step(way, since, character)
                if not taken or len(since) == _LONGEST:
                    return None
                if len(taken) == 1:
                    (way,), since = taken, ""
                else:
                    since += character
        except UnknownNotationError:
            return None
        return way, since, partial

    def _step(self, way: Way, since: str, character: str) -> set[Way] | None:
        """Return the ways right after a character. None if engines may differ on it."""
        edges, places = self._automaton.characters, self._places(way, since)
        found = _taken(((one, (end, stack)) for node, stack in places for one, end in edges[node]), ord(character))
        return None if found is None else {(self._reach(frozenset((end,))), stack) for end, stack in found}

    def _places(self, way: Way, since: str) -> frozenset[Place]:
        """Return where a character may come, after a way that was alone and the characters since then."""
        key = way, since
        if (known := self._known.get(key)) is not None:
            return known
        before = self._step(way, since[:-1], since[-1]) if since else {way}
        found = frozenset[Place]().union(*map(self._spread, before or ()))
        if len(found) > _MOST_WAYS:
            raise UnknownNotationError("too many ways")
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = found
        return found

    def _spread(self, way: Way) -> frozenset[Place]:
        """Return where a way may take a character: in its rule, in those that it calls, and behind it."""
        if (known := self._spreads.get(way)) is not None:
            return known
        found: set[Place] = set()
        seen, todo = set[Way](), [way]
        while todo:
            nodes, stack = place = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            if len(seen) > _MOST_WAYS:
                raise UnknownNotationError("too many ways")
            called: dict[str, set[int]] = {}
            for node in nodes:
                if self._automaton.characters[node]:
                    found.add((node, stack))
                if node in self._ends and stack:
                    todo.append((stack[0], stack[1]))
                for name, behind in self._automaton.calls[node]:
                    called.setdefault(name, set()).add(behind)
            for name, ends in called.items():
                first = self._reach(frozenset((self._first[name],)))
                todo.append((first, self._above(stack, self._reach(frozenset(ends)))))
        if len(self._spreads) >= _MOST_KNOWN:
            self._spreads.clear()
        self._spreads[way] = spread = frozenset(found)
        return spread

    def _above(self, stack: Stack, nodes: Nodes) -> Stack:
        """Return a stack with the nodes behind a rule on it. Where its own rule then ends, nothing is put there."""
        if not any(self._automaton.characters[node] or self._automaton.calls[node] for node in nodes):
            return stack
        height = stack[2] + 1 if stack else 1
        if height > _HIGHEST:
            raise UnknownNotationError("rules in rules, too many")
        return nodes, stack, height

    def _reach(self, nodes: Nodes) -> Nodes:
        """Return the nodes that are reached without a character and without a rule, and at which there is something."""
        if (known := self._reached.get(nodes)) is None:
            calls, edges = self._automaton.calls, self._automaton.characters
            reached = self._automaton.reach(list(nodes))
            known = frozenset(node for node in reached if edges[node] or calls[node] or node in self._ends)
            self._reached[nodes] = known
        return known


def _taken(edges: Iterable[tuple[CharacterSet, Any]], code: int) -> set[Any] | None:
    """Return the ends of the edges that take a character that an engine has allowed. None if this is in doubt.

    It is not if one set alone may have it, since the engine must have taken it from there.
    """
    found, doubted = set(), dict[CharacterSet, set[Any]]()
    for one, end in edges:
        takes = one.has(code)
        if takes is None:
            doubted.setdefault(one, set()).add(end)
        elif takes:
            found.add(end)
    if doubted:
        return doubted.popitem()[1] if len(doubted) == 1 and not found else None
    return found


def _characters(text: bytes) -> tuple[str, bytes] | None:
    """Return the whole characters of a text in UTF-8, and the bytes of the last one if it is not whole."""
    try:
        characters, length = codecs.utf_8_decode(text, "strict", False)
    except UnicodeDecodeError:
        return None
    return characters, text[length:]
