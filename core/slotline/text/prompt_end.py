"""Decode context: finds how the end of a prompt affects decoding the output after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

Decode = Callable[[Sequence[int]], str]

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Replacement that decoders write for bytes that are not a character, or not yet."""

_CONTEXT = 6
"""Prompt tokens before the output, so that the output keeps its leading space."""
_BYTES = 4
"""Most bytes of a character in UTF-8."""
_FAR = 64
"""Number of last prompt tokens searched for whole characters, if the prompt ends with an incomplete character."""


@frozen
class Begun:
    """Last tokens of a prompt that may begin a character.

    Attributes:
        token_ids: the tokens.
        shown: the part of their text that belongs to the prompt.
    """

    token_ids: list[int]
    shown: str


@frozen
class PromptEnd:
    """Context for decoding the output tokens.

    Attributes:
        context: prompt tokens that begin and end with whole characters.
        begun: possible beginnings of the character that the output may complete. Empty if the prompt ends with a whole
            character.
    """

    context: list[int]
    begun: tuple[Begun, ...]


def prompt_end(prompt_token_ids: Sequence[int], decode: Decode) -> PromptEnd:
    """Return the context of the output.

    A decoder with byte fallback reads all bytes of a run as unknown if one of them is. A context cut inside a character
    would therefore turn the prompt's last characters into output.
    """
    count = len(prompt_token_ids)
    for back in range(min(_BYTES, count)):
        end = count - back
        for start in range(max(0, end - _CONTEXT), max(-1, end - _CONTEXT - _BYTES), -1):
            context = list(prompt_token_ids[start:end])
            text = decode(context)
            if not text.startswith(UNKNOWN) and not text.endswith(UNKNOWN):
                return PromptEnd(context, _begun(prompt_token_ids, decode) if back else ())
    whole = (token for token in reversed(prompt_token_ids[-_FAR:]) if _is_whole(decode([token])))
    return PromptEnd([token] if (token := next(whole, None)) is not None else [], _begun(prompt_token_ids, decode))


def completed(begun: Begun, held: Sequence[int], decode: Decode) -> str | None:
    """Return the text of output tokens that complete the prompt's last character, or None if they do not."""
    text = decode([*begun.token_ids, *held])
    rest = text.removeprefix(begun.shown)
    if not text.startswith(begun.shown) or not rest or rest.startswith(UNKNOWN) or rest.endswith(UNKNOWN):
        return None
    return rest


def _begun(prompt_token_ids: Sequence[int], decode: Decode) -> tuple[Begun, ...]:
    lengths = range(1, min(_BYTES, len(prompt_token_ids) + 1))
    ends = [list(prompt_token_ids[-length:]) for length in lengths]
    texts = [decode(end) for end in ends]
    return tuple(
        Begun(end, text.rstrip(UNKNOWN)) for end, text in zip(ends, texts, strict=True) if text.endswith(UNKNOWN)
    )


def _is_whole(text: str) -> bool:
    return bool(text) and UNKNOWN not in text
