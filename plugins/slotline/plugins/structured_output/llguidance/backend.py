"""Structured output through llguidance (https://github.com/guidance-ai/llguidance).

llguidance is an Earley parser over a lexer of derivatives of regular expressions. It walks the vocabulary as a tree.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, field
from llguidance import LLExecutor, LLMatcher, StructTag, grammar_from

from slotline.plugins.structured_output.cores import num_cores
from slotline.plugins.structured_output.json_schema import refuse, refuse_uncounted_names, subschemas
from slotline.plugins.structured_output.llguidance.patterns import keep_quotes_out, mistaken_name
from slotline.plugins.structured_output.llguidance.tokenizer import build_tokenizer
from slotline.plugins.structured_output.number_bounds import refuse_uncounted_multiples
from slotline.plugins.structured_output.regex import MOST_FORCED, located, too_long
from slotline.plugins.structured_output.screen import refuse_long_text, screened
from slotline.plugins.structured_output.structural_tags import Demands, demands, structures
from slotline.registry.contracts import Constraint, GrammarState, StructuredOutputContext
from slotline.registry.errors import ContractError, RequestError, SlotlineError

Int32 = npt.NDArray[np.int32]
_OPTIONS = "%llguidance "
_OTHER = "change it, or try structured_output.backend = 'xgrammar'"
_MOST_THREADS = 4
_WORTH_WAKING = 16
"""States: fewer are asked in less time than it takes to wake threads."""


class LLGuidanceBackend:
    """A state is a copy of a compiled matcher.

    Copies share the matcher's lexer, which one thread at a time may use. So that several can make masks, a constraint
    is compiled once for each, and its states are dealt out among them.
    """

    def __init__(self, context: StructuredOutputContext) -> None:
        self.eos_token_ids = frozenset(context.eos_token_ids)
        width = max(context.vocab_size, len(context.tokenizer))  # llguidance wants a bit for each token that there is
        self._tokenizer = build_tokenizer(context.tokenizer, context.eos_token_ids, width)
        self._words = -(-width // 32)
        self._threads = context.options.threads or min(_MOST_THREADS, num_cores())
        self._executor = LLExecutor(self._threads)
        self._process = os.getpid()

    def check(self, constraint: Constraint) -> None:
        """See the contract: llguidance looks at a whole grammar in about the time that compiling takes."""
        kind, text = constraint.kind, constraint.text
        refuse_long_text(constraint)
        if kind == "json":
            self._check_schema(text, "structured_outputs.json at #")
        elif kind == "structural_tag":
            for structure in structures(text):
                self._check_schema(json.dumps(structure.schema), structure.place)
        elif why := self._refusal(_grammar(constraint)):
            if kind == "regex":
                raise RequestError(f"structured_outputs.regex={text!r}: {located(text, why)}", fix=_OTHER)
            raise RequestError(f"structured_outputs.{kind}: {why}", fix=_OTHER)
        elif kind == "regex" and (why := too_long(text)):
            raise RequestError(f"structured_outputs.regex={text!r:.60}: {why}", fix="repeat less")

    def compile(self, constraint: Constraint) -> LLGuidanceGrammar:
        """See the contract. llguidance lets go of the interpreter while it compiles.

        The first mask is made here too, which shows what is too complex: in the worst case after seconds.
        """
        grammar = _grammar(constraint)
        matchers = [LLMatcher(self._tokenizer, grammar, log_level=0) for _ in range(self._threads)]
        if matchers[0].is_error():
            why = _first_line(matchers[0].get_error())
            raise RequestError(f"structured_outputs.{constraint.kind}: {why}", fix=_OTHER)
        for matcher in matchers:
            first = matcher.deep_copy()  # shares what is found out about the grammar with the states
            first.compute_bitmask()
            if first.is_error():
                raise _failure(first)
            if (forced := len(first.compute_ff_bytes())) > MOST_FORCED:
                why = f"every text begins with the same {forced:,} bytes, more than {MOST_FORCED:,}"
                raise RequestError(f"structured_outputs.{constraint.kind}: {why}", fix="repeat less")
        return LLGuidanceGrammar(matchers)

    def start(self, grammar: LLGuidanceGrammar) -> GrammarState:
        """See the contract."""
        lexer = next(grammar.turns)
        return LLGuidanceState(grammar.matchers[lexer].deep_copy(), lexer, self.eos_token_ids)

    def fill(
        self,
        states: Sequence[LLGuidanceState],
        drafts: Sequence[Sequence[int]],
        places: Sequence[int],
        bitmask: Int32,
    ) -> None:
        """See the contract.

        Raises:
            ContractError: if a grammar became too complex for llguidance's limits.
            RequestError: if no text follows it.
        """
        if bitmask.shape[1] < self._words:
            wide = np.full((len(bitmask), self._words), -1, np.int32)
            self.fill(states, drafts, places, wide)
            bitmask &= wide[:, : bitmask.shape[1]]
            return
        if self._process != os.getpid():  # a forked child, in which the executor has no threads
            self._executor, self._process = LLExecutor(self._threads), os.getpid()
        pointer, width, count = bitmask.ctypes.data, bitmask.shape[1] * bitmask.itemsize, len(bitmask)
        plain, drafted = list(zip(states, places, strict=True)), []
        if any(drafts):
            walked = [
                state.before_end(assumed) if assumed else () for state, assumed in zip(states, drafts, strict=True)
            ]
            drafted = [(state.matcher, place, w) for (state, place), w in zip(plain, walked, strict=True) if w]
            plain = [one for one, w in zip(plain, walked, strict=True) if not w]
        if self._threads == 1 or len(plain) < _WORTH_WAKING:
            for state, place in plain:
                state.matcher.unsafe_compute_mask_ptr(pointer + place * width, width)
        else:  # threads take neighbours, so that each mostly uses one lexer
            plain.sort(key=lambda one: one[0].lexer)
            asked = [(state.matcher, place) for state, place in plain]
            self._executor.unsafe_compute_mask_ptr(asked, pointer, width, count)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, pointer, width, count)
        for state in states:
            if state.matcher.is_error():
                raise _failure(state.matcher)

    def token_text(self, token_id: int) -> bytes:
        """See the contract."""
        text: bytes = self._tokenizer.decode_bytes([token_id])
        return text

    def _check_schema(self, text: str, place: str) -> None:
        if isinstance(schema := json.loads(text), dict) and "x-guidance" in schema:
            raise RequestError(f"{place}: x-guidance sets options of llguidance", fix="leave it out")
        for pointer, part in subschemas(schema):
            if (name := mistaken_name(part)) is not None:
                raise RequestError(
                    f"{place}{pointer[1:]}: patternProperties {name!r:.60}: llguidance would let characters into names "
                    "that a class in it leaves out",
                    fix=_OTHER,
                )
        refuse(screened(text, place), self._schema_refusal, _OTHER, place)
        refuse_uncounted_multiples(text, place, _OTHER)
        refuse_uncounted_names(text, place)

    def _schema_refusal(self, schema: str) -> str | None:
        """Return why llguidance cannot take a schema, or None."""
        try:
            return self._refusal(_json_grammar(schema))
        except ValueError as error:
            return str(error)

    def _refusal(self, grammar: str) -> str | None:
        """Return the reason why llguidance refuses a grammar, or None."""
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        return messages[0] if failed else None


@define(eq=False)
class LLGuidanceGrammar:
    """Constraint compiled into `matchers`, which share nothing. `turns` selects the lexer for the next state."""

    matchers: Sequence[LLMatcher]
    turns: Iterator[int] = field(init=False)

    @turns.default
    def _in_turn(self) -> Iterator[int]:
        return cycle(range(len(self.matchers)))


@define(eq=False)
class LLGuidanceState:
    """Matcher that has seen only the known tokens. An illegal token would break it permanently."""

    matcher: LLMatcher
    lexer: int
    eos_token_ids: frozenset[int]

    @property
    def finished(self) -> bool:
        """See the contract."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def accept(self, token_ids: Sequence[int]) -> int:
        """See the contract.

        Raises:
            ContractError: if the grammar became too complex for llguidance's limits after a token.
        """
        text = self.before_end(token_ids)
        taken: int = self.matcher.try_consume_tokens(text)
        if taken < len(text) and self.matcher.is_error():
            raise _failure(self.matcher)
        return taken

    def count_legal(self, token_ids: Sequence[int]) -> int:
        """See the contract."""
        text = self.before_end(token_ids)
        count = self.accept(text)
        ends = len(text) < len(token_ids) and count == len(text) and bool(self.matcher.is_accepting())
        if count:
            self.matcher.rollback(count)
        return count + ends

    def forced(self) -> Sequence[int]:
        """See the contract."""
        token_ids: list[int] = self.matcher.compute_ff_tokens()
        return token_ids

    def before_end(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens before the first end-of-sequence token."""
        if self.eos_token_ids.isdisjoint(token_ids):
            return token_ids
        count = next(i for i, token in enumerate(token_ids) if token in self.eos_token_ids)
        return token_ids[:count]


def _grammar(constraint: Constraint) -> str:
    """Return a constraint in llguidance's own form.

    Raises:
        RequestError: if it cannot be read, with the place.
    """
    kind, text = constraint.kind, constraint.text
    grammar: str
    try:
        if kind in ("json", "json_object"):
            schema = _prepared(text, "structured_outputs.json at #") if kind == "json" else '{"type": "object"}'
            grammar = _json_grammar(schema, any_whitespace=constraint.any_whitespace)
        elif kind == "structural_tag":
            tags = [
                StructTag(
                    trigger=s.trigger,
                    begin=s.begin,
                    grammar=json.loads(_prepared(json.dumps(s.schema), s.place)),
                    end=s.end,
                )
                for s in structures(text)
            ]
            grammar = _with_demands(StructTag.to_grammar(tags, assume_special=False), tags, demands(text))
        elif kind == "choice":  # one lexeme: a lexeme for each would meet llguidance's limit at 2,000
            grammar = LLMatcher.grammar_from_lark(
                f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, json.loads(text)))}"
            )
        else:
            grammar = _unforced(grammar_from("gbnf", text)) if kind == "grammar" else grammar_from(kind, text)
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"structured_outputs.{kind}: {error}", fix="correct it there") from error
    return grammar


def _unforced(grammar: str) -> str:
    """Return a grammar in llguidance's own form for which no forced text is looked for.

    Text is forced without an end where a greedy terminal follows itself, as in ``c+ c+``, and llguidance 1.9.1 then
    never returns from a mask.
    """
    options: dict[str, Any] = {}
    rest = grammar.lstrip()
    if rest.startswith(_OPTIONS):
        options, end = json.JSONDecoder().raw_decode(rest[len(_OPTIONS) :])
        rest = rest[len(_OPTIONS) + end :]
    return f"{_OPTIONS}{json.dumps(options | {'no_forcing': True})}\n{rest}"


def _with_demands(grammar: str, tags: Sequence[StructTag], wanted: Demands) -> str:
    """Return a structural tag's grammar whose text begins with a tag, or ends with the first one, if that is wanted."""
    if not (wanted.at_least_one or wanted.stop_after_first):
        return grammar
    any_tag = " | ".join(f"tag_{index}" for index in range(len(tags)))
    first = any_tag
    if wanted.at_least_one:
        first = " | ".join(f"first_{index}" for index in range(len(tags)))
        for index, tag in enumerate(tags):
            inside, end = f"%json {json.dumps(tag.grammar)}", _quoted(tag.end) if tag.end else ""
            grammar += f"first_{index}: {_quoted(tag.begin)} {inside} {end}\n"
    rest = "" if wanted.stop_after_first else f" ({any_tag})* tag_end"
    start = f"({first}){rest}" if wanted.at_least_one else f"({first}) | tag_end"
    return grammar.replace(f"start: ({any_tag})* tag_end", f"start: {start}")


def _prepared(text: str, place: str) -> str:
    """Return a schema as it is compiled.

    Raises:
        RequestError: with the JSON pointer of what cannot be.
    """
    root = json.loads(screened(text, place))
    keep_quotes_out(root)
    return json.dumps(root, ensure_ascii=False)


def _json_grammar(schema: str, *, any_whitespace: bool = True) -> str:
    """Return a schema in llguidance's own form.

    Raises:
        ValueError: if it cannot be read.
    """
    options = {"whitespace_flexible": any_whitespace, "lenient": False}
    grammar: str = LLMatcher.grammar_from_json_schema(schema, overrides=options)
    return grammar


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _failure(matcher: LLMatcher) -> SlotlineError:
    """Return the reason of a matcher's error."""
    why = _first_line(matcher.get_error())
    if why == "NoExtensionBias":
        return RequestError("no text fits structured_outputs", fix="loosen the constraint")
    return ContractError(f"llguidance gave up: {why}")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
