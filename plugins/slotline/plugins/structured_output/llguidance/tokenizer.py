"""The vocabulary as llguidance sees it, in which an end-of-sequence token has no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer

_SLICES = ("[0-9]+", "[1-9][0-9]*", "[a-z]+", "[a-zA-Z0-9_]+")
"""Parts of the vocabulary beside llguidance's own, which are white space and what stands in JSON strings: where every
token of one may come next, one look at the expression says so, and none of them is walked."""


def build_tokenizer(tokenizer: Any, eos_token_ids: Sequence[int], width: int) -> LLTokenizer:
    """Return llguidance's tokenizer with `width` tokens.

    Args:
        tokenizer: transformers' fast tokenizer.
        eos_token_ids: tokens that end a text. If one is ordinary text, e.g. a newline, llguidance would also allow it
            inside a text, although the text ends there. llguidance then gets a vocabulary in which the token has no
            text.
        width: at least as many tokens as the tokenizer has.
    """
    slices = [*LLTokenizer.general_slices(), *_SLICES]
    known = [token for token in eos_token_ids if token < len(tokenizer)]
    plain = from_tokenizer(tokenizer, n_vocab=width, eos_token=known or None, slices=slices)
    if len(known) == len(eos_token_ids) and all(plain.is_special_token(token) for token in known):
        return plain
    return LLTokenizer(_WithoutText(plain, eos_token_ids, width), eos_token=list(eos_token_ids), slices=slices)


class _WithoutText:
    """A tokenizer whose end-of-sequence tokens have no text, in the form that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, plain: LLTokenizer, eos_token_ids: Sequence[int], width: int) -> None:
        ends = frozenset(eos_token_ids)
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = [token for token in range(width) if token in ends or plain.is_special_token(token)]
        special = frozenset(self.special_token_ids)
        self.tokens = [
            f"<[{token}]>".encode() if token in special else plain.decode_bytes([token]) for token in range(width)
        ]
        self._plain = plain
        self._ends = ends
        self._by_text = {text: token for token, text in enumerate(self.tokens) if token not in special and text}
        self._longest = max(map(len, self._by_text), default=0)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text, the longest first where the usual ones have an end among them."""
        tokens: list[int] = self._plain.tokenize_str(text)
        return tokens if self._ends.isdisjoint(tokens) else self._longest_first(text.encode())

    def _longest_first(self, text: bytes) -> list[int]:
        """Return tokens from the beginning of a text, as far as the vocabulary without the ends reaches."""
        found: list[int] = []
        begin = 0
        while begin < len(text):
            pieces = (text[begin : begin + size] for size in range(min(self._longest, len(text) - begin), 0, -1))
            piece = next((piece for piece in pieces if piece in self._by_text), b"")
            if not piece:
                break
            found.append(self._by_text[piece])
            begin += len(piece)
        return found
