"""The structured-output contract, version 1 (provisional): grammars that determine the legal next tokens.

A plugin compiles a constraint (a JSON schema, a regular expression, ...) once, outside the step's thread. It then
determines for each request the legal tokens after its text. It never sees logits: the core writes the masks of all
requests into one array, copies it to the device once, and applies it between processors and sampling.

The core also handles the end of a text. End-of-sequence tokens are legal only if the text is complete, and a request
whose text can only end there ends at once.
"""

from __future__ import annotations

import json as _json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from slotline.registry.capability import Set
from slotline.registry.declared import declared
from slotline.registry.errors import RequestError
from slotline.registry.plain_values import plain_number
from slotline.registry.safe_repr import safe_repr

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The ways to say what a text must look like; each is a parameter of `StructuredOutputsParams`."""
_DEEPEST = 100
"""Levels of a schema as JSON: to look at one takes XGrammar a time that grows with their third power, 4.6 s for 300."""


@frozen
class Constraint:
    """Constraint on a text, ready to be compiled. Equal constraints are compiled once.

    Attributes:
        kind: one of `CONSTRAINTS`.
        text: for ``json`` a JSON schema, for ``regex`` a regular expression that the whole text matches, for ``choice``
            a JSON list of strings, for ``grammar`` an EBNF grammar in the notation of llama.cpp (GBNF) whose rule
            ``root`` the text follows, for ``structural_tag`` a JSON object. "" for ``json_object``.
        any_whitespace: True if JSON may have any white space between its elements. Otherwise it only has the plugin's
            own fixed separators.
    """

    kind: str
    text: str
    any_whitespace: bool = True


def _json_text(name: str, value: Any) -> str:
    """Return a value as JSON text. A string is checked and returned unchanged, so that positions in it stay valid.

    Raises:
        RequestError: with line and column of the error.
    """
    try:
        text = value if isinstance(value, str) else _json.dumps(value, ensure_ascii=False)
        levels = _levels(_json.loads(text, parse_constant=_refuse_constant))
    except _json.JSONDecodeError as error:
        raise RequestError(
            f"structured_outputs.{name} is no JSON: line {error.lineno}, column {error.colno}: {error.msg}",
            fix="correct it there",
        ) from error
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured_outputs.{name} is no JSON: {error}", fix="use JSON's types alone") from error
    except RecursionError:
        levels = _DEEPEST + 1
    if levels > _DEEPEST:
        raise RequestError(f"structured_outputs.{name} is nested more than {_DEEPEST} deep", fix="nest it less deeply")
    return text


def _refuse_constant(name: str) -> None:
    """Refuse NaN and the infinities, which Python reads but JSON does not have.

    Raises:
        ValueError: naming the constant.
    """
    raise ValueError(f"{name} is no number of JSON")


def _levels(value: Any) -> int:
    """Return the nesting depth of a JSON value."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_levels, inner), default=0)


def _check_unicode(name: str, text: str) -> None:
    """Refuse half of a surrogate pair, which no tokenizer's text can contain.

    Raises:
        RequestError: with its position.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"structured_outputs.{name} has {text[error.start]!r} at position {error.start}, a lone surrogate",
            fix="write whole characters",
        ) from error


def _strings(value: Any) -> Any:
    try:
        return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value
    except Exception:  # an object may only claim to be iterable, and is refused below
        return value


@frozen(kw_only=True)
class StructuredOutputsParams:
    """Constraint on a request's output. Exactly one kind of constraint must be given.

    Attributes:
        json: a JSON schema, as a mapping or as text. The output is JSON that it accepts.
        regex: a regular expression that the whole output matches.
        choice: texts, one of which is the output.
        grammar: a context-free grammar in the notation of llama.cpp (GBNF). The output follows its rule ``root``.
        json_object: the output is any JSON object.
        structural_tag: free text in which the text between given tags follows a schema. A mapping or JSON text.
        disable_any_whitespace: no white space in JSON except fixed separators.
        after: a text. The output is free until it has written this text, and only what follows is constrained. None to
            constrain it from the first token on.

    Raises:
        RequestError: naming the parameter, its value and the allowed values. For JSON with line and column.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = field(default=None, converter=_strings)
    grammar: str | None = None
    json_object: bool = field(default=False, converter=plain_number)
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = field(default=False, converter=plain_number)
    after: str | None = None
    constraint: Constraint = field(init=False, repr=False)

    @constraint.default
    def _constraint(self) -> Constraint:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(
                    f"structured_outputs.{name}={safe_repr(value)} is not allowed", fix=f"{name} must be True or False"
                )
        if self.after is not None and (not isinstance(self.after, str) or not self.after):
            raise RequestError(
                f"structured_outputs.after={safe_repr(self.after)} is not allowed", fix="give a text, or None"
            )
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None and getattr(self, name) != ""]
        given = [name for name in given if name != "json_object" or self.json_object]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {', '.join(given) or 'no constraint'}",
                fix=f"give exactly one of {', '.join(CONSTRAINTS)}",
            )
        (kind,) = given
        text = self._text(kind)
        _check_unicode(kind, text)
        return Constraint(kind, text, not self.disable_any_whitespace)

    def _text(self, kind: str) -> str:
        value = getattr(self, kind)
        if kind == "json_object":
            return ""
        if kind == "choice":
            if not isinstance(value, tuple) or not value or not all(isinstance(v, str) and v for v in value):
                raise RequestError(
                    f"structured_outputs.choice={safe_repr(value)} is not allowed",
                    fix="give a list of non-empty strings",
                )
            return _json.dumps(list(dict.fromkeys(value)), ensure_ascii=False)
        if kind in ("json", "structural_tag"):
            return _json_text(kind, value)
        if not isinstance(value, str):
            raise RequestError(f"structured_outputs.{kind}={safe_repr(value)} is not allowed", fix="give a string")
        return value


@frozen(kw_only=True, field_transformer=declared)
class StructuredOutputCapabilities:
    """Capabilities that a structured-output plugin declares.

    Attributes:
        constraints: some of `CONSTRAINTS`.
        devices: device types. Masks are made on the host, so most plugins support any device.
        priority: ``auto`` tries plugins in descending order. `priority_reason` gives the reason.
        reusable_masks: whether two states of a grammar whose texts can be continued alike have the same mask, unless
            everything that may follow begins with the same byte. Then it may also hang on the last token. The core
            keeps masks of plugins that say so, and asks for fewer.
        every_tokenization: whether masks allow every tokenization of what may follow, so that they never hang on the
            last token. The core then keeps one mask for all last tokens.
    """

    constraints: Set[str]
    devices: Set[str] = Set(None)
    priority: int = 0
    priority_reason: str = ""
    reusable_masks: bool = False
    every_tokenization: bool = False


@frozen(kw_only=True)
class StructuredOutputContext:
    """Input of a structured-output plugin's factory.

    Attributes:
        tokenizer: transformers' fast tokenizer of the model.
        vocab_size: the width of the logits, which may be more or less than the tokenizer's number of tokens.
        eos_token_ids: the tokens that end a text, at least one.
        max_requests: most requests whose masks are filled at a time.
    """

    contract: int
    tokenizer: Any
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_requests: int
    options: Any = None


class GrammarState(Protocol):
    """Position of one request's text in its grammar. Used by one thread at a time."""

    @property
    def finished(self) -> bool:
        """True if the text is complete and only an end-of-sequence token can follow."""
        ...

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens as long as they are legal, and return the number of legal ones.

        End-of-sequence tokens are never passed.
        """
        ...

    def count_legal(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens, from the first, that `accept` would take. Changes nothing.

        An end-of-sequence token counts if it is legal, and ends the count.
        """
        ...

    def forced(self) -> Sequence[int]:
        """Return tokens whose text must come next, in the most plausible tokenization. May be empty.

        The core offers them as drafts, so another tokenization only costs time. Changes nothing.
        """
        ...


class StructuredOutput(Protocol):
    """Protocol of a built structured-output plugin."""

    def check(self, constraint: Constraint) -> None:
        """Refuse constraints that cannot be compiled, as far as a few milliseconds allow. Called at admission.

        Raises:
            slotline.registry.errors.RequestError: with the position of the error and a fix.
        """
        ...

    def compile(self, constraint: Constraint) -> Any:
        """Compile a constraint. The result is shared by requests.

        Called in a separate thread, possibly for several constraints at a time.

        Raises:
            slotline.registry.errors.RequestError: if it cannot be compiled. Only the requests with this constraint
                fail.
        """
        ...

    def start(self, grammar: Any) -> GrammarState:
        """Return the state of a request without output. `grammar` is the result of `compile`."""
        ...

    def fill(
        self,
        states: Sequence[GrammarState],
        drafts: Sequence[Sequence[int]],
        places: Sequence[int],
        bitmask: npt.NDArray[np.int32],
    ) -> None:
        """Write the masks of legal next tokens.

        Called by one thread at a time, which may differ from the thread that advances the states. If it raises, it is
        called again for each state separately, so it must have stopped using all states when it raises.

        Args:
            states: the states of the requests, without repetition.
            drafts: for each request, the tokens assumed after its text, or none. The states are unchanged afterwards.
            places: for each request, its first row of `bitmask`. The following rows are the masks after each draft.
                Rows after an illegal draft and after an end-of-sequence token stay unchanged.
            bitmask: [num_rows, ceil(vocab_size / 32)] int32, all ones. Bit ``t % 32`` of word ``t // 32`` stays 1 if
                token t may come next. An end-of-sequence token may come if the text is complete, even if it is ordinary
                text like a newline. Other special tokens and ids that the tokenizer does not have are always 0. If all
                remaining texts continue with the same bytes, a plugin may leave fewer of their tokenizations, at least
                one.
        """
        ...

    def token_text(self, token_id: int) -> bytes:
        """Return the text of a token that is not special, as masks see it. Optional without `reusable_masks`."""
        ...
