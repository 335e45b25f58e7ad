"""Grammars that begin once an output has written a text, as the end of its reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, field

from slotline.registry.contracts import GrammarState

Decode = Callable[[Sequence[int]], str]


@define(eq=False)
class WaitingGrammar:
    """Grammar of an output that has not written `marker` yet.

    A token may hold the end of the marker and more. What it holds behind the marker belongs to the free text.

    Attributes:
        state: of a request without output.
        marker: the text.
        decode: returns the text of tokens, with special tokens.
    """

    state: GrammarState
    marker: str
    decode: Decode
    _tail: list[int] = field(factory=list, init=False)

    def add(self, token_id: int) -> bool:
        """Add a token of the output. Return True if the marker is complete."""
        self._tail.append(token_id)
        del self._tail[: -self._reach]
        return self.marker in self.decode(self._tail)

    def end_in(self, token_ids: Sequence[int]) -> int | None:
        """Return the number of tokens that complete the marker if they come next. None if they do not."""
        tail = list(self._tail)
        for count, token_id in enumerate(token_ids, 1):
            tail.append(token_id)
            if self.marker in self.decode(tail[-self._reach :]):
                return count
        return None

    @property
    def _reach(self) -> int:
        """The most tokens that the marker may be spread over."""
        return len(self.marker.encode())
