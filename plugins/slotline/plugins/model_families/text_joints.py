"""Joints between the text of a prompt and the text at the ends of an item's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any


class TextJoints:
    """Joins tokens as the tokenizer would split their whole text.

    Example: Gemma 3 puts two line breaks around an image, and two and one more are one token of its tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}

    def join(self, left: Sequence[int], right: Sequence[int]) -> list[int]:
        """See `slotline.registry.contracts.model_family.JoiningModel.join`.

        Tokens that the tokenizer would not make of their own text stay as they are, since the caller wanted them so.
        """
        head = list(takewhile(self._is_text, right))
        tail = list(takewhile(self._is_text, reversed(left))) if head else []
        joined = [*reversed(tail), *head]
        if tail:
            texts = self._text(joined[: len(tail)]), self._text(head)
            if (*map(self._tokens, texts),) == (joined[: len(tail)], head):
                joined = self._tokens("".join(texts))
        return [*left[: len(left) - len(tail)], *joined, *right[len(head) :]]

    def _is_text(self, token: int) -> bool:
        return token not in self._special

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text

    def _tokens(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids
