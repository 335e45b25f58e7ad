"""Expected masks of structured output, by testing every token of the vocabulary against every text of the language.

Only for languages whose texts can be listed. A token may come next if the text extended by it is a prefix of one of
them. The text may end if it is one of them. No parser, no automaton, no mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary represents, as in GPT-2's tokenizer."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes | None]:
    """Return the bytes of each token of a byte-level tokenizer. None for special and unknown tokens."""
    alphabet, found = byte_alphabet(), list[bytes | None]([None]) * vocab_size
    for token, index in tokenizer.get_vocab().items():
        if index < vocab_size and index not in tokenizer.all_special_ids:
            found[index] = bytes(alphabet[character] for character in token)
    return found


def _encoded(texts: Iterable[str]) -> frozenset[bytes]:
    return frozenset(text.encode() for text in texts)


@frozen(eq=False)
class Language:
    """Set of all texts that a constraint allows."""

    texts: frozenset[bytes] = field(converter=_encoded)
    prefixes: frozenset[bytes] = field(init=False)

    @prefixes.default
    def _prefixes(self) -> frozenset[bytes]:
        return frozenset(text[:end] for text in self.texts for end in range(len(text) + 1))

    def allowed(self, text: bytes, tokens: list[bytes | None], eos: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Return [vocab_size] bool: the tokens that may follow a text."""
        allowed = np.array([token is not None and text + token in self.prefixes for token in tokens])
        allowed[[*eos]] = text in self.texts
        return allowed

    def forced(self, text: bytes) -> bool:
        """Return True if every text that begins with this one continues, and with the same byte."""
        longer = {other[len(text) : len(text) + 1] for other in self.texts if other.startswith(text)}
        return len(longer) == 1 and longer != {b""}

    def over(self, text: bytes) -> bool:
        """Return True if a text is complete and nothing can follow it."""
        return text in self.texts and not any(other.startswith(text) and other != text for other in self.texts)


def matches(expression: str, alphabet: str, longest: int) -> Language:
    """Return the texts over an alphabet, up to a length, that an expression matches as a whole."""
    texts = ("".join(word) for length in range(longest + 1) for word in product(alphabet, repeat=length))
    return Language(text for text in texts if re.fullmatch(expression, text))


def unpacked(bitmask: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return a bitmask as [num_rows, vocab_size] bool."""
    return np.unpackbits(bitmask.view(np.uint8), axis=1, count=vocab_size, bitorder="little").astype(bool)
