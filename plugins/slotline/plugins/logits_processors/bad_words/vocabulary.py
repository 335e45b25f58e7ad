"""The bytes that each token of a tokenizer adds to a text, and which tokens begin with or hold some bytes."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"


class Vocabulary:
    """Tokens by their bytes.

    Attributes:
        pieces: bytes that each token adds to a text, none for special tokens, which no text shows.
    """

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        order = sorted((token for token, piece in enumerate(pieces) if piece), key=pieces.__getitem__)
        self._sorted = [pieces[token] for token in order]
        self._order = np.array(order, np.int64)

    def beginning_with(self, start: bytes) -> npt.NDArray[np.int64]:
        """Return the tokens that begin with some bytes."""
        first = bisect_left(self._sorted, start)
        end = bisect_right(self._sorted, start, lo=first, key=lambda piece: piece[: len(start)])
        return self._order[first:end]

    def holding(self, part: bytes) -> npt.NDArray[np.int64]:
        """Return the tokens that hold some bytes anywhere."""
        return np.array([token for token, piece in enumerate(self.pieces) if part in piece], np.int64)


def pieces_of(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """Return the bytes of each token of one of transformers' fast tokenizers.

    Byte-level tokens (GPT-2's alphabet) and byte-fallback ones (``<0xE4>``) may hold parts of characters. Tokens of
    other tokenizers are decoded after another token, which shows if a space comes before them.
    """
    size = min(len(tokenizer), vocab_size)
    names: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(size)))
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    kinds = set(_decoder_types(_decoder_of(tokenizer)))
    pieces = [b""] * vocab_size
    anchor = next((token for token in range(size) if token not in added), None)
    for token, name in enumerate(names):
        if name is None or (token in added and added[token].special):
            continue
        if token in added:
            pieces[token] = added[token].content.encode()
        elif "ByteLevel" in kinds:
            pieces[token] = _of_byte_level(name)
        elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
            byte = _BYTE.fullmatch(name) if "ByteFallback" in kinds else None
            pieces[token] = bytes.fromhex(byte[1]) if byte else name.replace(_SPACE, " ").encode()
        elif anchor is not None:
            pieces[token] = _behind(tokenizer, anchor, token).encode()
    return pieces


def _behind(tokenizer: Any, anchor: int, token: int) -> str:
    """Return what a token adds to the text of another."""
    before: str = tokenizer.backend_tokenizer.decode([anchor])
    both: str = tokenizer.backend_tokenizer.decode([anchor, token])
    return both.removeprefix(before)


def _decoder_of(tokenizer: Any) -> Any:
    decoder = tokenizer.backend_tokenizer.decoder
    return {} if decoder is None else json.loads(decoder.__getstate__())


def _decoder_types(decoder: Any) -> Iterator[str]:
    """Yield the type of a decoder, and of those that it is made of."""
    yield decoder.get("type", "")
    for part in decoder.get("decoders", ()):
        yield from _decoder_types(part)


def _of_byte_level(name: str) -> bytes:
    table = _byte_level_alphabet()
    return b"".join(table[char] if char in table else char.encode() for char in name)


@cache
def _byte_level_alphabet() -> dict[str, bytes]:
    """Return the byte that each character of GPT-2's alphabet represents (Radford et al. 2019, `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): bytes([byte]) for byte in plain} | {
        chr(256 + place): bytes([byte]) for place, byte in enumerate(others)
    }
