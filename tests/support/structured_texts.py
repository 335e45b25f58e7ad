"""Texts held against a structured-output plugin, byte by byte, by the small model's tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

from attrs import define, field

from slotline.core import StructuredOutputsParams
from slotline.planner.plan import SMALL_MODEL
from slotline.registry.contracts import StructuredOutput, StructuredOutputContext
from slotline.testing.oracles.structured_output import token_bytes
from slotline.testing.subject import subject_of
from slotline.text.tokenizer import Tokenizer

PLUGINS = ("xgrammar", "llguidance")
EOS = (0, 3)


@cache
def tokenizer() -> Any:
    """Return the small model's tokenizer."""
    return Tokenizer(SMALL_MODEL).transformers


@cache
def byte_tokens() -> dict[int, int]:
    """Return the token of each single byte."""
    pieces = token_bytes(tokenizer(), len(tokenizer()))
    return {piece[0]: token for token, piece in enumerate(pieces) if piece and len(piece) == 1}


def tokens_of(text: str) -> list[int]:
    """Return a text as tokens of one byte each."""
    return [byte_tokens()[byte] for byte in text.encode()]


def context(eos_token_ids: tuple[int, ...] = EOS, vocab_size: int | None = None) -> StructuredOutputContext:
    """Return a plugin's context with the small model's tokenizer."""
    return StructuredOutputContext(
        contract=1,
        tokenizer=tokenizer(),
        vocab_size=vocab_size or len(tokenizer()),
        eos_token_ids=eos_token_ids,
        max_requests=4,
    )


@define(eq=False)
class Texts:
    """A built plugin, asked whether whole texts follow a constraint."""

    plugin: str
    backend: StructuredOutput = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.backend = subject_of(f"structured_output:{self.plugin}").build(context())

    def compiled(self, **wanted: Any) -> Any:
        """Return a checked and compiled constraint, given as `StructuredOutputsParams` takes it."""
        constraint = StructuredOutputsParams(**wanted).constraint
        self.backend.check(constraint)
        return self.backend.compile(constraint)

    def follows(self, grammar: Any, text: str) -> bool:
        """Return whether a text follows a compiled constraint and may end."""
        tokens = tokens_of(text)
        return self.backend.start(grammar).count_legal([*tokens, EOS[0]]) == len(tokens) + 1
