"""Incremental detokenisation and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT = 6  # prompt tokens that prime the decoder, so that a leading space is kept


class Detokenizer:
    """Turns tokens into text as they come, never splitting a character, and finds stop strings.

    Attributes:
        text: what may be shown so far; a stop string at its end is cut off unless it is to be included.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._stream: Any = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._held: list[int] = []
        for token in prompt_token_ids[-_CONTEXT:]:
            self._advance(token)

    @property
    def settled(self) -> str:
        """The part of the text that no later token can take back: a stop string may have begun at its end."""
        return self.text[: max(0, len(self.text) - self._longest_stop + 1)] if self._longest_stop > 1 else self.text

    def append(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add a token; returns the stop string that the text now ends with, if any and if it may stop yet."""
        self._held.append(token_id)
        piece = self._advance(token_id)
        if not piece:
            return None
        self._held.clear()
        before = len(self.text)
        self.text += piece
        return self._cut_at_stop(before) if may_stop else None

    def finish(self) -> None:
        """Show what was held back because it did not end at a character."""
        if self._held:
            self.text += self._tokenizer.decode(self._held, skip_special_tokens=self._skip_special)
            self._held.clear()

    def _advance(self, token_id: int) -> str | None:
        try:
            piece: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # a byte-fallback decoder reads bytes otherwise once an invalid one follows: start afresh
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            self._stream.step(self._tokenizer, token_id)
            piece = self._tokenizer.decode(self._held, skip_special_tokens=self._skip_special)
        return piece

    def _cut_at_stop(self, before: int) -> str | None:
        """Cut the text at the first stop string that ends behind its first `before` characters."""
        found = [
            (position, stop)
            for stop in self._stop
            if (position := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        position, stop = min(found)
        self.text = self.text[: position + (len(stop) if self._include_stop else 0)]
        return stop
