"""Incremental detokenisation and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from slotline.text.prompt_end import completed, prompt_end


class Detokenizer:
    """Incremental decoder of one output. It never splits a character, and it finds stop strings.

    The prompt is only context: none of its bytes are output. If the output completes a character that the prompt began,
    the character belongs to the output. Otherwise the prompt's part of it is left out.

    Attributes:
        text: the text that may be shown so far, without a stop string at its end unless that is to be included.
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
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._held: list[int] = []
        end = prompt_end(prompt_token_ids, self._decode)
        self._begun = end.begun
        self._stream = self._stream_behind(end.context)

    @property
    def settled(self) -> str:
        """Return the text without its end, in which a stop string may have begun.

        No later token can change the returned part.
        """
        return self.text[: max(0, len(self.text) - self._longest_stop + 1)] if self._longest_stop > 1 else self.text

    def append(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add a token.

        Return the stop string that the text now ends with, or None if there is none or it may not stop yet.
        """
        self._held.append(token_id)
        piece = self._completed() or self._advance(token_id)
        if not piece:
            return None
        self._held.clear()
        self._begun = ()
        before = len(self.text)
        self.text += piece
        return self._cut_at_stop(before) if may_stop else None

    def finish(self) -> None:
        """Append the text held back because it did not end with a whole character."""
        if self._held:
            self.text += self._decode(self._held)
            self._held.clear()

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
        return text

    def _stream_behind(self, context: list[int]) -> Any:
        """Return a decoder for the text after that of `context`."""
        return DecodeStream(ids=context, skip_special_tokens=self._skip_special)

    def _completed(self) -> str | None:
        """Return the text of the held tokens if they complete the prompt's last character."""
        for begun in self._begun:
            if (piece := completed(begun, self._held, self._decode)) is not None:
                self._stream = self._stream_behind([*begun.token_ids, *self._held])
                return piece
        return None

    def _advance(self, token_id: int) -> str | None:
        try:
            piece: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # after an invalid byte, byte fallback decodes the earlier bytes anew
            self._stream = self._stream_behind([token_id])
            piece = self._decode(self._held)
        return piece

    def _cut_at_stop(self, before: int) -> str | None:
        """Cut the text at the first stop string that ends after its first `before` characters."""
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
