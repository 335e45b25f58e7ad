"""Structured-output plugin in plain Python: a list of texts to choose from. A state keeps the bytes so far."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slotline.registry.capability import Set
from slotline.registry.contracts import (
    Constraint,
    GrammarState,
    StructuredOutputCapabilities,
    StructuredOutputContext,
)
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import RequestError
from slotline.testing.oracles.structured_output import token_bytes

Choices = tuple[bytes, ...]


class ChoiceState:
    """Remaining choices, and the length of the text so far."""

    def __init__(self, backend: ChoiceBackend, left: Choices, begin: int = 0) -> None:
        self.backend = backend
        self.left = left
        self.begin = begin

    @property
    def finished(self) -> bool:
        """See the contract."""
        return bool(self.left) and all(len(choice) == self.begin for choice in self.left)

    @property
    def complete(self) -> bool:
        """True if the text may end here."""
        return any(len(choice) == self.begin for choice in self.left)

    def accept(self, token_ids: Sequence[int]) -> int:
        """See the contract."""
        for count, token in enumerate(token_ids):
            text = self.backend.tokens[token]
            left = tuple(c for c in self.left if text and c.startswith(text, self.begin))
            if not left:
                return count
            self.left, self.begin = left, self.begin + len(text or b"")
        return len(token_ids)

    def count_legal(self, token_ids: Sequence[int]) -> int:
        """See the contract."""
        trial = self.copy()
        count = trial.accept(token_ids)
        ends = count < len(token_ids) and token_ids[count] in self.backend.eos_token_ids and trial.complete
        return count + ends

    def forced(self) -> Sequence[int]:
        """Return the common continuation of all choices, in tokens of one letter each."""
        found: list[int] = []
        for letters in zip(*(choice[self.begin :] for choice in self.left), strict=False):
            if len(set(letters)) > 1 or any(len(choice) == self.begin + len(found) for choice in self.left):
                break
            found.append(self.backend.by_text[bytes(letters[:1])][0])
        return found

    def legal(self) -> list[int]:
        """Return the tokens that may come next."""
        rests = {choice[self.begin : end] for choice in self.left for end in range(self.begin + 1, len(choice) + 1)}
        tokens = [token for rest in rests for token in self.backend.by_text.get(rest, ())]
        return tokens + (list(self.backend.eos_token_ids) if self.complete else [])

    def copy(self) -> ChoiceState:
        """Return an independent copy of the state."""
        return type(self)(self.backend, self.left, self.begin)


class ChoiceBackend:
    """Backend that knows the bytes of each token, and the tokens of each byte sequence."""

    def __init__(self, context: StructuredOutputContext) -> None:
        self.eos_token_ids = context.eos_token_ids
        self.tokens = token_bytes(context.tokenizer, context.vocab_size)
        self.by_text: dict[bytes, list[int]] = defaultdict(list)
        for index, text in enumerate(self.tokens):
            if text:
                self.by_text[text].append(index)

    def check(self, constraint: Constraint) -> None:
        """See the contract."""
        if constraint.kind != "choice":
            raise RequestError(f"structured_outputs.{constraint.kind}: choices alone", fix="give a choice")

    def compile(self, constraint: Constraint) -> Choices:
        """See the contract."""
        self.check(constraint)
        return tuple(text.encode() for text in json.loads(constraint.text))

    def start(self, grammar: Choices) -> GrammarState:
        """See the contract."""
        return ChoiceState(self, grammar)

    def fill(
        self,
        states: Sequence[ChoiceState],
        drafts: Sequence[Sequence[int]],
        places: Sequence[int],
        bitmask: npt.NDArray[np.int32],
    ) -> None:
        """See the contract."""
        for state, assumed, place in zip(states, drafts, places, strict=True):
            trial = state.copy()
            self.write(trial, bitmask[place])
            for index, token in enumerate(assumed):
                if not trial.accept([token]):
                    break
                self.write(trial, bitmask[place + 1 + index])

    def write(self, state: ChoiceState, words: npt.NDArray[np.int32]) -> None:
        """Write one row."""
        words[:] = 0
        for token in state.legal():
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


descriptor = Descriptor(
    kind=Kind.STRUCTURED_OUTPUT,
    name="reference",
    capabilities=StructuredOutputCapabilities(constraints=Set(("choice",)), priority=-1),
    factory=ChoiceBackend,
    summary="choices in plain Python",
)
