"""Environment of a structured-output plugin: the small model's tokenizer, and constraints whose texts can be listed.

Every mask therefore has one correct value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from slotline.planner.plan import SMALL_MODEL
from slotline.registry.contracts import Constraint, GrammarState, StructuredOutputContext
from slotline.testing.check import Case, Failed
from slotline.testing.oracles.structured_output import Language, matches, token_bytes, unpacked
from slotline.testing.subject import Subject

EOS_TOKEN_IDS = (0, 3)
Mask = npt.NDArray[np.bool_]


@frozen(eq=False)
class Example:
    """Constraint with its texts."""

    name: str
    constraint: Constraint
    language: Language


def _json(schema: Any) -> Constraint:
    return Constraint("json", json.dumps(schema), any_whitespace=False)


_CHOICES = ("yes", "no", "not at all", "not", "日本", "é", 'say "yes"', "back\\slash", "two\nlines", "yesterday")
EXAMPLES = (
    Example("one choice", Constraint("choice", '["import numpy as np"]'), Language(["import numpy as np"])),
    Example("choice", Constraint("choice", json.dumps(_CHOICES, ensure_ascii=False)), Language(_CHOICES)),
    Example("regex", Constraint("regex", "(ab|a)?c{1,2}(b|ca)?"), matches("(ab|a)?c{1,2}(b|ca)?", "abc", 7)),
    Example("regex classes", Constraint("regex", "[a-c]{2}[x-zé-í日]?"), Language(
        first + second + third for first in "abc" for second in "abc" for third in ["", *"xyzéêëìí日"]
    )),
    Example("grammar", Constraint("grammar", 'root ::= item ("," item)?\nitem ::= "a" | "(" "b"? ")"'), Language(
        first + rest for first in ("a", "()", "(b)") for rest in ("", ",a", ",()", ",(b)")
    )),
    Example("json values", _json({"enum": ["a", "bc", 12, None, True]}), Language(
        ['"a"', '"bc"', "12", "null", "true"]
    )),
    Example("json integers", _json({"type": "integer", "minimum": 7, "maximum": 123}), Language(
        map(str, range(7, 124))
    )),
)  # fmt: skip
"""Every kind of constraint whose texts can be listed."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
DOCUMENTS: tuple[tuple[Constraint, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        Constraint("json", json.dumps(PERSON)),
        ('{"name": "ab", "age": 3}', '{"name":"ab","age":3}', '{"name": "é", "age": 0, "tags": ["x", "y"]}'),
        (
            "[]",
            '{"age": 3}',
            '{"name": "", "age": 3}',
            '{"name": "abcdef", "age": 3}',
            '{"name": "ab", "age": -3}',
            '{"name": "ab", "age": 3, "tags": ["z"]}',
            '{"name": "ab", "age": 3, "x": 1}',
        ),
    ),
    (Constraint("json_object", ""), ("{}", '{"a": [1, {"b": null}]}'), ("[]", "1", '{"a"}', "{a: 1}", '{"a": 01}')),
    (
        Constraint("json", json.dumps({"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "boolean"}}]})),
        ("null", "[]", "[true, false]"),
        ("true", "[null]", "[1]", "{}"),
    ),
)
"""Constraints of too many texts, with some that they allow and some that they do not."""

WRONG = (
    Constraint("json", '{"type": "strin"}'),
    Constraint("json", "3"),
    Constraint("json", '{"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}'),
    Constraint("json", '{"type": "string", "pattern": "(a"}'),
    Constraint("regex", "(a"),
    Constraint("regex", "a{2,1}"),
    Constraint("grammar", 'root ::= "a" | b'),
    Constraint("grammar", 'root ::= "a'),
    Constraint("structural_tag", '{"structures": []}'),
)


@cache
def tokenizer() -> Any:
    """Return the tokenizer of the small model that ships."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(SMALL_MODEL), local_files_only=True, trust_remote_code=False)


@define(eq=False)
class World:
    """Built plugin, with the calls that the core makes.

    Attributes:
        subject: the plugin.
        vocab_size: width of the logits. 0 for the tokenizer's.
    """

    subject: Subject
    vocab_size: int = 0
    backend: Any = field(init=False)
    tokens: list[bytes | None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.vocab_size = self.vocab_size or len(tokenizer())
        self.tokens = token_bytes(tokenizer(), self.vocab_size)
        self.backend = self.subject.build(context(self.vocab_size))

    def start(self, constraint: Constraint) -> GrammarState:
        """Return a new state of a constraint, checked and compiled."""
        self.backend.check(constraint)
        state: GrammarState = self.backend.start(self.backend.compile(constraint))
        return state

    def masks(self, states: Sequence[GrammarState], drafts: Sequence[Sequence[int]] | None = None) -> list[list[Mask]]:
        """Return, for each state, the masks at its position and after each draft, each [vocab_size].

        Raises:
            Failed: if unrequested rows in between are written.
        """
        drafts = drafts or [[]] * len(states)
        places, size = [], 1
        for assumed in drafts:
            places.append(size)
            size += len(assumed) + 2
        bitmask = np.full((size, -(-self.vocab_size // 32)), -1, np.int32)
        self.backend.fill(states, drafts, places, bitmask)
        gaps = [place - 1 for place in places] + [size - 1]
        if (bitmask[gaps] != -1).any():
            raise Failed("fill wrote to rows of the bitmask that it was not given")
        wide = unpacked(bitmask, self.vocab_size)
        return [list(wide[p : p + 1 + len(d)]) for p, d in zip(places, drafts, strict=True)]

    def mask(self, state: GrammarState) -> Mask:
        """Return the mask of one state."""
        return self.masks([state])[0][0]

    def split(self, constraint: Constraint, text: bytes, rng: Random) -> list[int]:
        """Return a text of a constraint in tokens, with a random tokenization as far as the masks leave a choice.

        Raises:
            Failed: if the masks do not allow the text.
        """
        state, found, begin = self.start(constraint), list[int](), 0
        while begin < len(text):
            allowed = np.flatnonzero(self.mask(state)).tolist()
            fitting = [i for i in allowed if (token := self.tokens[i]) and text.startswith(token, begin)]
            if not fitting:
                raise Failed(f"{constraint}: no token is allowed after {text[:begin]!r} that leads to {text!r}")
            found.append(rng.choice(fitting))
            if state.accept(found[-1:]) != 1:
                raise Failed(f"{constraint}: after {text[:begin]!r}, token {found[-1]} is allowed and not accepted")
            begin += len(self.tokens[found[-1]] or b"")
        return found

    def text(self, token_ids: Iterable[int]) -> bytes:
        """Return the bytes of some tokens."""
        return b"".join(self.tokens[token] or b"" for token in token_ids)

    def expect(self, mask: Mask, language: Language, text: bytes, where: str) -> None:
        """Compare a mask with the language. If all texts continue in the same way, the mask may be a subset.

        Raises:
            Failed: naming a token that is wrongly allowed or banned.
        """
        want = language.allowed(text, self.tokens, EOS_TOKEN_IDS)
        if language.forced(text) and (mask & want).any():
            want &= mask  # a plugin may leave fewer tokenizations of a forced text
        for what, wrong in (("allowed", mask & ~want), ("banned", want & ~mask)):
            if wrong.any():
                token = int(wrong.argmax())
                shown = "an end-of-sequence token" if token in EOS_TOKEN_IDS else repr(self.tokens[token])
                raise Failed(
                    f"{where}: after {text!r}, token {token} ({shown}) is {what}, and {int(wrong.sum())} in all"
                )


def context(vocab_size: int) -> StructuredOutputContext:
    """Return a build context."""
    return StructuredOutputContext(
        contract=1, tokenizer=tokenizer(), vocab_size=vocab_size, eos_token_ids=EOS_TOKEN_IDS, max_requests=8
    )


def takes(subject: Subject, constraint: Constraint) -> bool:
    """Return True if the plugin declares the constraint's kind."""
    return subject.capabilities.constraints.refusal(constraint.kind) is None


def by_example(subject: Subject) -> Iterable[Case]:
    """Return a case for each example of a declared kind."""
    return [{"example": example.name} for example in EXAMPLES if takes(subject, example.constraint)]


def example_named(name: str) -> Example:
    """Return an example by its name."""
    return next(example for example in EXAMPLES if example.name == name)


def declared(subject: Subject) -> list[Example]:
    """Return the examples of declared kinds."""
    return [example for example in EXAMPLES if takes(subject, example.constraint)]


def some_texts(example: Example, rng: Random, count: int) -> list[bytes]:
    """Return some texts of a language, the same for the same generator."""
    texts = sorted(example.language.texts)
    return rng.sample(texts, min(count, len(texts)))
