"""A drafter for tests whose state of a row is the text that it observed, tokens that fell taken back."""

from __future__ import annotations

from typing import ClassVar

from attrs import evolve

from slotline.registry import Descriptor, Kind, Max, Set
from slotline.registry.contracts import ComputedTokens, Draft, DraftBatch, DrafterCapabilities, DrafterContext


class Reader:
    """Proposes the newest token again, and keeps what it knew.

    Attributes:
        known: the prompt and the text so far of each request of each proposal, as its state has it.
        heard: what it was told of rows, in order.
        fails: whether the next `observe` raises, after it changed its states.
    """

    descriptor = Descriptor(
        kind=Kind.DRAFTER,
        name="reader",
        factory="",
        capabilities=DrafterCapabilities(
            devices=Set(None), max_tokens=Max(), needs_computed=True, state="rows", on_device=True
        ),
    )
    known: ClassVar[list[tuple[tuple[int, ...], tuple[int, ...]]]] = []
    heard: ClassVar[list[tuple[str, int]]] = []
    fails: ClassVar[bool] = False

    def __init__(self, context: DrafterContext) -> None:
        self.count = context.num_tokens
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.texts: dict[int, list[int]] = {}

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Begin with nothing."""
        self.heard.append(("admit", row))
        self.prompts[row], self.texts[row] = tuple(prompt_token_ids), []

    def release(self, row: int) -> None:
        """Have no state of the row from now on."""
        self.heard.append(("release", row))
        del self.texts[row]

    def preempt(self, row: int) -> None:
        """Begin again."""
        self.heard.append(("preempt", row))
        self.texts[row] = []

    def observe(self, computed: ComputedTokens) -> None:
        """Put the tokens behind those before them."""
        assert computed.served is not None
        starts, tokens = computed.query_start_loc.tolist(), computed.token_ids.tolist()
        for i, row in enumerate(computed.rows.tolist()):
            if computed.served[i]:
                place, text = int(computed.positions[starts[i]]), self.texts[row]
                assert place <= len(text), f"tokens {len(text)} to {place} of row {row} were not observed"
                text[place:] = tokens[starts[i] : starts[i + 1]]
        if self.fails:
            type(self).fails = False
            raise RuntimeError("lost")

    def propose(self, batch: DraftBatch) -> Draft:
        """Keep what is known, the newest token included."""
        newest, positions = batch.last_token_ids.tolist(), batch.positions.tolist()
        for row, token, place in zip(batch.rows.tolist(), newest, positions, strict=True):
            self.known.append((self.prompts[row], (*self.texts[row][:place], token)))
        return Draft(token_ids=batch.last_token_ids[:, None].expand(-1, self.count).contiguous())


class Deaf(Reader):
    """Hears of no preemption."""

    descriptor = evolve(Reader.descriptor, name="deaf")

    def preempt(self, row: int) -> None:
        """Raise."""
        raise RuntimeError("deaf")
