"""Positions in texts of choices, see `MaskCache`: texts of which the same is left have one position."""

from __future__ import annotations

import json

from slotline.plugins.structured_output.automaton import UnknownNotationError

_MOST_BYTES = 1 << 17


class ChoiceForm:
    """Positions in one of several texts, given as a JSON list: nodes of their tree, in which equal rests are one.

    Raises:
        UnknownNotationError: if the texts are too long together.
    """

    def __init__(self, text: str) -> None:
        choices = [choice.encode() for choice in json.loads(text)]
        if sum(map(len, choices)) > _MOST_BYTES:
            raise UnknownNotationError("too many bytes")
        edges, ends = [dict[int, int]()], [False]
        for choice in choices:
            node = 0
            for byte in choice:
                if byte not in edges[node]:
                    edges[node][byte] = len(edges)
                    edges.append({})
                    ends.append(False)
                node = edges[node][byte]
            ends[node] = True
        known: dict[tuple[bool, tuple[tuple[int, int], ...]], int] = {}
        same = list(range(len(edges)))
        for node in reversed(range(len(edges))):  # what follows a node has a greater number
            edges[node] = {byte: same[following] for byte, following in edges[node].items()}
            same[node] = known.setdefault((ends[node], tuple(sorted(edges[node].items()))), node)
        self._edges = edges
        self.start = same[0]

    def after(self, position: int, text: bytes) -> int | None:
        """Return the position after more text. None if it begins no choice."""
        node: int | None = position
        for byte in text:
            node = None if node is None else self._edges[node].get(byte)
        return node
