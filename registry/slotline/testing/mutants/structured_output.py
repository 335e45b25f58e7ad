"""Structured-output plugins with one fault each, and right ones that differ from the reference.

Most are the reference with one method changed: its language is that of choices, so every fault shows in their masks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from slotline.registry.contracts import Constraint, GrammarState, StructuredOutputContext
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference.structured_output import ChoiceBackend, Choices, ChoiceState, descriptor

Bitmask = npt.NDArray[np.int32]


def _mutant(name: str, what: str, level: Level, backend: type, **changes: Any) -> Mutant:
    made = attrs.evolve(descriptor, name=name, factory=backend, **changes)
    return Mutant(name, what, level, made)


def _with(name: str, **methods: Any) -> type:
    """Return the reference's backend with some methods changed."""
    return type(name, (ChoiceBackend,), methods)


def _starting(state: type[ChoiceState]) -> type:
    """Return the reference's backend with another class of states."""
    return _with(state.__name__, start=lambda self, grammar: state(self, grammar))


class NeverEnds(ChoiceState):
    """Allows no end of sequence."""

    def legal(self) -> list[int]:
        return [token for token in super().legal() if token not in self.backend.eos_token_ids]


class EndsAnywhere(ChoiceState):
    """Allows the end of sequence at every place."""

    def legal(self) -> list[int]:
        return [*super().legal(), *self.backend.eos_token_ids]


class FirstEndAlone(ChoiceState):
    """Knows one of two end-of-sequence tokens."""

    def legal(self) -> list[int]:
        return [token for token in super().legal() if token not in self.backend.eos_token_ids[1:]]


class WholeChoices(ChoiceState):
    """Allows tokens that end a choice, and single bytes. Other tokens that begin the rest are banned."""

    def legal(self) -> list[int]:
        return [t for t in super().legal() if len(self.backend.tokens[t] or b"x") < 2 or self._ends(t)]

    def _ends(self, token: int) -> bool:
        text = self.backend.tokens[token] or b""
        return any(choice[self.begin :] == text for choice in self.left)


class FinishedWhenComplete(ChoiceState):
    """Is finished where the text could end, though it could go on."""

    @property
    def finished(self) -> bool:
        return self.complete


class NeverFinished(ChoiceState):
    """Waits for the end-of-sequence token."""

    @property
    def finished(self) -> bool:
        return False


class ForcesTheFirst(ChoiceState):
    """Forces the first choice that is left."""

    def forced(self) -> Sequence[int]:
        rest = self.left[0][self.begin :]
        return [self.backend.by_text[rest[i : i + 1]][0] for i in range(len(rest))]


class CountMoves(ChoiceState):
    """count_legal advances."""

    def count_legal(self, token_ids: Sequence[int]) -> int:
        count = super().count_legal(token_ids)
        self.accept(token_ids[:count])
        return count


class CountWithoutEnd(ChoiceState):
    """count_legal does not count an end."""

    def count_legal(self, token_ids: Sequence[int]) -> int:
        return self.copy().accept(token_ids)


def _walks_for_good(
    self: ChoiceBackend,
    states: Sequence[ChoiceState],
    drafts: Sequence[Sequence[int]],
    places: Sequence[int],
    bitmask: Bitmask,
) -> None:
    ChoiceBackend.fill(self, states, drafts, places, bitmask)
    for state, assumed in zip(states, drafts, strict=True):
        state.accept(assumed)


def _one_mask_for_all_drafts(
    self: ChoiceBackend,
    states: Sequence[ChoiceState],
    drafts: Sequence[Sequence[int]],
    places: Sequence[int],
    bitmask: Bitmask,
) -> None:
    for state, assumed, place in zip(states, drafts, places, strict=True):
        for index in range(len(assumed) + 1):
            self.write(state, bitmask[place + index])


def _one_behind(
    self: ChoiceBackend,
    states: Sequence[ChoiceState],
    drafts: Sequence[Sequence[int]],
    places: Sequence[int],
    bitmask: Bitmask,
) -> None:
    ChoiceBackend.fill(self, states, drafts, places, bitmask)
    for place, assumed in zip(places, drafts, strict=True):
        bitmask[place + len(assumed) + 1] = 0


def _in_order(
    self: ChoiceBackend,
    states: Sequence[ChoiceState],
    drafts: Sequence[Sequence[int]],
    places: Sequence[int],
    bitmask: Bitmask,
) -> None:
    known = sorted(range(len(states)), key=lambda i: states[i].left)
    ChoiceBackend.fill(self, [states[i] for i in known], [drafts[i] for i in known], places, bitmask)


def _fails_on_wrong_drafts(
    self: ChoiceBackend,
    states: Sequence[ChoiceState],
    drafts: Sequence[Sequence[int]],
    places: Sequence[int],
    bitmask: Bitmask,
) -> None:
    for state, assumed in zip(states, drafts, strict=True):
        if state.copy().accept(assumed) < len(assumed):
            raise ValueError("a draft is not legal")
    ChoiceBackend.fill(self, states, drafts, places, bitmask)


def _last_word_free(self: ChoiceBackend, state: ChoiceState, words: Bitmask) -> None:
    ChoiceBackend.write(self, state, words)
    words[-1] |= np.int32(-(1 << 24))


class SharedState(ChoiceBackend):
    """Gives every request of a grammar the same state."""

    def __init__(self, context: StructuredOutputContext) -> None:
        super().__init__(context)
        self.states: dict[Choices, ChoiceState] = {}

    def start(self, grammar: Choices) -> ChoiceState:
        return self.states.setdefault(grammar, ChoiceState(self, grammar))


class CompilesInPlace(ChoiceBackend):
    """Keeps the constraint that it compiles in one attribute."""

    def compile(self, constraint: Constraint) -> Choices:
        import time

        self.now = json.loads(constraint.text)
        time.sleep(0.02)
        return tuple(text.encode() for text in self.now)


class FixedWidth(ChoiceBackend):
    """Takes the tokenizer's size for the logits' width."""

    def __init__(self, context: StructuredOutputContext) -> None:
        super().__init__(attrs.evolve(context, vocab_size=len(context.tokenizer)))

    def write(self, state: ChoiceState, words: Bitmask) -> None:
        super().write(state, words[: len(self.tokens) // 32])


class SpecialTokensAreText(ChoiceBackend):
    """Allows special tokens wherever a text is not complete."""

    def write(self, state: ChoiceState, words: Bitmask) -> None:
        super().write(state, words)
        if not state.complete:
            words[0] |= np.int32(1 << 1)


with attrs.validators.disabled():  # or it could not be made
    _LISTED: Any = attrs.evolve(descriptor.capabilities, constraints=["choice"])  # type: ignore[arg-type]


class UsedState(ChoiceBackend):
    """Gives the third state of a compiled grammar out again for the fourth, as it was left."""

    def __init__(self, context: StructuredOutputContext) -> None:
        super().__init__(context)
        self.given: dict[int, list[ChoiceState]] = {}
        self.kept: list[Choices] = []

    def start(self, grammar: Choices) -> ChoiceState:
        if not any(grammar is one for one in self.kept):
            self.kept.append(grammar)  # so that no other grammar gets its id
        given = self.given.setdefault(id(grammar), [])
        given.append(given[2] if len(given) == 3 else ChoiceState(self, grammar))
        return given[-1]


class Reusable(ChoiceBackend):
    """Tells the texts of tokens, so that masks can be used again."""

    def token_text(self, token_id: int) -> bytes:
        """See the contract."""
        return self.tokens[token_id] or b""


class TrimmedTexts(Reusable):
    """Tells the texts of tokens without the blanks around them, as a tokenizer that decodes one token does."""

    def token_text(self, token_id: int) -> bytes:
        return super().token_text(token_id).strip()


class RemembersTokens(ChoiceState):
    """Allows no token of several bytes behind an odd number of bytes."""

    def legal(self) -> list[int]:
        odd = self.begin % 2 == 1
        return [token for token in super().legal() if not odd or len(self.backend.tokens[token] or b"") < 2]


class ReusableByPlace(Reusable):
    """Declares masks reusable that hang on what came before."""

    def start(self, grammar: Choices) -> GrammarState:
        return RemembersTokens(self, grammar)


class ForcesByLastToken(ChoiceState):
    """Behind a token of one byte, allows no token of several bytes of text that must come."""

    several = True

    def accept(self, token_ids: Sequence[int]) -> int:
        begin, taken = self.begin, super().accept(token_ids)
        self.several = self.begin != begin + 1
        return taken

    def copy(self) -> ForcesByLastToken:
        copied = ForcesByLastToken(self.backend, self.left, self.begin)
        copied.several = self.several
        return copied

    def legal(self) -> list[int]:
        every = super().legal()
        texts = [self.backend.tokens[token] or b"" for token in every]
        if self.several or len({text[:1] for text in texts}) > 1:
            return every
        return [token for token, text in zip(every, texts, strict=True) if len(text) < 2]


class ReusableButForced(Reusable):
    """Declares that masks allow every tokenization, but not of text that must come."""

    def start(self, grammar: Choices) -> GrammarState:
        return ForcesByLastToken(self, grammar)


_REUSABLE = attrs.evolve(descriptor.capabilities, reusable_masks=True)
_EVERY = attrs.evolve(_REUSABLE, every_tokenization=True)


MUTANTS = (
    _mutant("never-ends", "an end of sequence is never legal", Level.NUMERICS, _starting(NeverEnds)),
    _mutant("ends-anywhere", "an end of sequence is always legal", Level.NUMERICS, _starting(EndsAnywhere)),
    _mutant("one-end-of-two", "knows one end-of-sequence token of two", Level.NUMERICS, _starting(FirstEndAlone)),
    _mutant("whole-choices", "tokens across a choice's parts are banned", Level.NUMERICS, _starting(WholeChoices)),
    _mutant("finished-early", "finished where the text could go on", Level.NUMERICS, _starting(FinishedWhenComplete)),
    _mutant("never-finished", "waits for an end-of-sequence token", Level.NUMERICS, _starting(NeverFinished)),
    _mutant("forces-the-first", "forces what other choices do not have", Level.NUMERICS, _starting(ForcesTheFirst)),
    _mutant("count-moves", "count_legal advances the state", Level.HOSTILE, _starting(CountMoves)),
    _mutant("count-without-end", "count_legal leaves a legal end out", Level.HOSTILE, _starting(CountWithoutEnd)),
    _mutant("walks-for-good", "drafts stay accepted", Level.HOSTILE, _with("WalksForGood", fill=_walks_for_good)),
    _mutant(
        "one-mask", "the same mask behind every draft", Level.HOSTILE, _with("OneMask", fill=_one_mask_for_all_drafts)
    ),
    _mutant("one-behind", "writes one row too many", Level.NUMERICS, _with("OneBehind", fill=_one_behind)),
    _mutant("sorted", "fills the rows in an order of its own", Level.HOSTILE, _with("Sorted", fill=_in_order)),
    _mutant(
        "wrong-drafts", "a wrong draft is an error", Level.HOSTILE, _with("WrongDrafts", fill=_fails_on_wrong_drafts)
    ),
    _mutant("last-word", "the last bits are always 1", Level.NUMERICS, _with("LastWord", write=_last_word_free)),
    _mutant("used-state", "the fourth state of a grammar is the used third", Level.HOSTILE, UsedState),
    _mutant("shared-state", "one state for all requests of a grammar", Level.NUMERICS, SharedState),
    _mutant("one-compiler", "two compilations at a time mix", Level.HOSTILE, CompilesInPlace),
    _mutant("fixed-width", "the logits are as wide as the tokenizer", Level.HOSTILE, FixedWidth),
    _mutant("special-text", "special tokens are text", Level.NUMERICS, SpecialTokensAreText),
    _mutant(
        "trimmed-texts", "blanks are not part of a token's text", Level.NUMERICS, TrimmedTexts, capabilities=_REUSABLE
    ),
    _mutant(
        "masks-by-place", "masks hang on what came before", Level.NUMERICS, ReusableByPlace, capabilities=_REUSABLE
    ),
    _mutant(
        "forced-by-token",
        "forced text hangs on the last token",
        Level.NUMERICS,
        ReusableButForced,
        capabilities=_EVERY,
    ),
    _mutant(
        "kinds-in-a-list",
        "the constraints are a list",
        Level.CONTRACT,
        ChoiceBackend,
        capabilities=_LISTED,
    ),
)


class CachesMasks(ChoiceBackend):
    """Remembers the masks of places that it has seen."""

    def __init__(self, context: StructuredOutputContext) -> None:
        super().__init__(context)
        self.known: dict[tuple[Choices, int], Bitmask] = {}

    def write(self, state: ChoiceState, words: Bitmask) -> None:
        key = (state.left, state.begin)
        if key not in self.known:
            super().write(state, words)
            self.known[key] = words.copy()
        words[:] = self.known[key]


class Silent(ChoiceState):
    """Forces nothing, which is always right."""

    def forced(self) -> Sequence[int]:
        return ()


CORRECT = (
    Correct("choices in plain Python", descriptor),
    Correct("the same with masks remembered", attrs.evolve(descriptor, name="remembers", factory=CachesMasks)),
    Correct(
        "one whose masks can be used again",
        attrs.evolve(descriptor, name="reusable", factory=Reusable, capabilities=_REUSABLE),
    ),
    Correct(
        "one whose masks never hang on the last token",
        attrs.evolve(descriptor, name="every", factory=Reusable, capabilities=_EVERY),
    ),
    Correct("one that forces nothing", attrs.evolve(descriptor, name="silent", factory=_starting(Silent))),
)
