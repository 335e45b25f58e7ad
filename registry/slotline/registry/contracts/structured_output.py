"""The structured-output contract, version 1 (provisional): grammars that say which tokens may come next.

A plugin compiles a constraint (a JSON schema, a regular expression, ...) once, away from the step's thread, and then
answers for each request which tokens are legal after those that it has. It never sees logits: the core writes the
answers of all requests into one array, takes it to the device once, and applies it between processors and sampling.

The core also sees to the end: end-of-sequence tokens are legal only where the text is complete, and a request whose
text can only end there ends at once.
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
    """What a text must look like, ready to be compiled; equal ones are compiled once.

    Attributes:
        kind: of `CONSTRAINTS`.
        text: for ``json`` a JSON schema, for ``regex`` a regular expression that the whole text matches, for
            ``choice`` a JSON list of strings, for ``grammar`` an EBNF grammar in the notation of llama.cpp (GBNF) whose
            rule ``root`` the text follows, for ``structural_tag`` a JSON object; "" for ``json_object``.
        any_whitespace: whether JSON may have white space between its elements as the model likes; else it has none but
            the plugin's own fixed separators.
    """

    kind: str
    text: str
    any_whitespace: bool = True


def _json_text(name: str, value: Any) -> str:
    """A value as JSON text; a text is checked and stays as it is, so that positions in it keep their meaning.

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
    """Refuse NaN and the infinities, which Python reads and JSON does not have.

    Raises:
        ValueError: naming it.
    """
    raise ValueError(f"{name} is no number of JSON")


def _levels(value: Any) -> int:
    """How deep JSON is nested."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_levels, inner), default=0)


def _check_unicode(name: str, text: str) -> None:
    """Refuse half of a character, which no text that a tokenizer makes can hold.

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
    except Exception:  # what calls itself iterable need not be; it is refused below
        return value


@frozen(kw_only=True)
class StructuredOutputsParams:
    """What a request's output must look like: exactly one of the constraints.

    Attributes:
        json: a JSON schema, as a mapping or as text; the output is JSON that it accepts.
        regex: a regular expression that the whole output matches.
        choice: texts, one of which is the output.
        grammar: a context-free grammar in the notation of llama.cpp (GBNF); the output follows its rule ``root``.
        json_object: the output is any JSON object.
        structural_tag: free text in which what stands between given tags follows a schema; a mapping or JSON text.
        disable_any_whitespace: no white space in JSON but fixed separators.

    Raises:
        RequestError: naming the parameter, its value and what is allowed; for JSON with line and column.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = field(default=None, converter=_strings)
    grammar: str | None = None
    json_object: bool = field(default=False, converter=plain_number)
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = field(default=False, converter=plain_number)
    constraint: Constraint = field(init=False, repr=False)

    @constraint.default
    def _constraint(self) -> Constraint:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(
                    f"structured_outputs.{name}={safe_repr(value)} is not allowed", fix=f"{name} must be True or False"
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
    """What a structured-output plugin offers.

    Attributes:
        constraints: of `CONSTRAINTS`.
        devices: device types; masks are made on the host, so any will do for most.
        priority: where ``auto`` chooses, the highest goes first; `priority_reason` says why.
    """

    constraints: Set[str]
    devices: Set[str] = Set(None)
    priority: int = 0
    priority_reason: str = ""


@frozen(kw_only=True)
class StructuredOutputContext:
    """What a structured-output plugin's factory gets.

    Attributes:
        tokenizer: transformers' fast tokenizer of the model.
        vocab_size: the width of the logits, which may be more or less than the tokenizer has tokens.
        eos_token_ids: the tokens that end a text, at least one.
        max_requests: most requests whose masks are wanted at a time.
    """

    contract: int
    tokenizer: Any
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_requests: int
    options: Any = None


class GrammarState(Protocol):
    """Where one request's text stands in its grammar. Used by one thread at a time."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end-of-sequence token can follow."""
        ...

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens as long as they are legal; returns how many were. End-of-sequence tokens are not given."""
        ...

    def count_legal(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens, from the first on, `accept` would take; an end-of-sequence token counts where it is
        legal, and nothing behind it. Changes nothing."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens whose text must come next whatever the model thinks, at the most plausible split; may be empty.

        The core offers them as drafts, so a wrong split costs time and nothing else. Changes nothing.
        """
        ...


class StructuredOutput(Protocol):
    """What a built structured-output plugin can do."""

    def check(self, constraint: Constraint) -> None:
        """Refuse what cannot be compiled, as far as that can be seen in a few milliseconds; called at admission.

        Raises:
            slotline.registry.errors.RequestError: with the position of the error, and what to do.
        """
        ...

    def compile(self, constraint: Constraint) -> Any:
        """Compile; called in a thread of its own, for several constraints at a time. The result is shared by requests.

        Raises:
            slotline.registry.errors.RequestError: if it cannot; the requests with this constraint fail alone.
        """
        ...

    def start(self, grammar: Any) -> GrammarState:
        """The state of a request that has no output yet. `grammar` is what `compile` returned."""
        ...

    def fill(
        self,
        states: Sequence[GrammarState],
        drafts: Sequence[Sequence[int]],
        places: Sequence[int],
        bitmask: npt.NDArray[np.int32],
    ) -> None:
        """Write which tokens may come next.

        Called by one thread at a time, but not always by the one that advances the states. Where it fails, it is called
        again for each state alone, so none may be in use any more when it raises.

        Args:
            states: the requests'; none stands twice.
            drafts: for each, tokens assumed behind its text, or none. The states are the same afterwards.
            places: for each, its first row of `bitmask`; the next ones are for each draft the tokens that may follow
                it. Rows behind a draft that is not legal, and behind an end-of-sequence token, are left as they are.
            bitmask: [num_rows, ceil(vocab_size / 32)] int32, all ones. Bit ``t % 32`` of word ``t // 32`` is left 1
                where token t may come next; an end-of-sequence token may where the text is complete, also one that is
                ordinary text, such as a newline, and no other special token and no token that the tokenizer does not
                have ever may. Where every text that is left goes on with
                the same bytes, a plugin may leave fewer ways to cut them into tokens, one at least.
        """
        ...
