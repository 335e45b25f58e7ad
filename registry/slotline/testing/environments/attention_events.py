"""Blocks that change hands under an attention backend that hears of them.

A `Story` has two rows of blocks and texts that come to lie in them: written by steps, restored with the contents that
they had, or put there by a connector. The backend is told of each, as the engine does it. A text has a needle, a key
that decides the output of its last token, so that one check serves exact backends and those that leave blocks out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, frozen

from slotline.testing.check import Run
from slotline.testing.environments.attention import World
from slotline.testing.environments.attention_choice import build, chosen, longest_query, world, writes_cache
from slotline.testing.environments.attention_told import events_of
from slotline.testing.environments.attention_variants import part_of, plant

LOUD = 20.0
"""Factor on the keys of a text whose blocks look promising to every query, as long as they are remembered."""


@frozen(eq=False)
class Text:
    """Tokens of a request: query [L, H, D], key [L, Hkv, D] and value [L, Hkv, Dv]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Story:
    """Two rows of `num_blocks` whole blocks and one more, a backend, and what it is told.

    Args:
        run: the run.
        num_blocks: whole blocks of a text. Its last token is the first of one more block.
    """

    def __init__(self, run: Run, num_blocks: int) -> None:
        self.run, self.num_blocks = run, num_blocks
        size = chosen(run, ((1, 1),)).block_size
        self.length = num_blocks * size + 1
        self.size = size
        case = evolve(chosen(run, ((1, self.length),) * 2).friendly(), exact=False)
        self.home: World = world(run, case)
        self.backend = build(run, case, told=True)
        self._drawn = 0

    def text(self, needle: int | None) -> Text:
        """Return a new text with a needle at a position. None for a loud one, whose last output is not checked."""
        self._drawn += 1
        case = evolve(self.home.case, requests=((1, self.length),), seed=self.run.seed % (1 << 30) + self._drawn)
        drawn = World(case, str(self.home.device))
        if needle is not None:
            plant(drawn, 0, needle)
        key = drawn.keys[0] if needle is not None else drawn.keys[0] * LOUD
        query = drawn.queries[0].expand(self.length, -1, -1)
        return Text(query, key, drawn.values[0])

    def continued(self, first: Text, needle: int, shared: int) -> Text:
        """Return a text that begins with the first `shared` tokens of another, with its own needle.

        The needle of the other one may lie in the common part, and its queries are those of the new text then.
        """
        text = self.text(needle)
        query = first.query if needle < shared else text.query
        key, value = (
            torch.cat([a[:shared], b[shared:]]) for a, b in ((first.key, text.key), (first.value, text.value))
        )
        return Text(query, key, value)

    def blocks(self, row: int, first: int = 0, end: int | None = None) -> list[int]:
        """Return some of a row's blocks, all but the last one by default."""
        return self.home.owned[row][first : self.num_blocks if end is None else end]

    def last(self, row: int) -> list[int]:
        """Return the row's last block, for the last token of a text."""
        return self.home.owned[row][self.num_blocks :]

    def tell(
        self,
        *,
        returned: Sequence[int] = (),
        given: Sequence[int] = (),
        restored: Sequence[int] = (),
        loaded: Sequence[int] = (),
    ) -> None:
        """Tell the backend what happened since the last step."""
        self.backend.block_events([events_of(returned, given, restored, loaded)])

    def read(self, row: int, text: Text, first: int = 0) -> None:
        """Write all tokens of a text but the last one in steps, from position `first` on, into a row."""
        limit = longest_query(self.run.subject, {})
        while first < self.length - 1:
            end = min(self.length - 1, first + limit)
            self._part(row, text, end - first, end).run(self.backend, writes_cache(self.run))
            first = end

    def decode(self, row: int, text: Text) -> None:
        """Run the last token of a text, and compare its output with the oracle."""
        step = self._part(row, text, 1, self.length)
        out, _ = step.run(self.backend, writes_cache(self.run))
        step.check(out, run=self.run)

    def put(self, row: int, text: Text) -> None:
        """Put a text's whole blocks into a row, as a connector does."""
        self.home.keys[row], self.home.values[row] = text.key, text.value
        self.home.store(row, range(self.length - 1))

    def _part(self, row: int, text: Text, count: int, length: int) -> World:
        self.home.keys[row], self.home.values[row] = text.key, text.value
        step = part_of(self.home, row, count, length)
        step.queries = [text.query[length - count : length]]
        return step
