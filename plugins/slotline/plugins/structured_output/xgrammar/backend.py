"""Structured output through XGrammar (https://github.com/mlc-ai/xgrammar, Dong et al. 2024, arXiv 2411.15100)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt
import xgrammar
from attrs import asdict, define

from slotline.plugins.structured_output.cores import num_cores
from slotline.plugins.structured_output.json_schema import refuse, refuse_uncounted_names, subschemas
from slotline.plugins.structured_output.regex import located, misread, too_long
from slotline.plugins.structured_output.screen import refuse_long_text, screened
from slotline.plugins.structured_output.structural_tags import demands, structures
from slotline.plugins.structured_output.xgrammar.cost import seconds
from slotline.plugins.structured_output.xgrammar.endless import endless
from slotline.plugins.structured_output.xgrammar.keywords import unenforced
from slotline.plugins.structured_output.xgrammar.patterns import broken_by, in_ascii
from slotline.registry.contracts import Constraint, GrammarState, StructuredOutputContext
from slotline.registry.errors import RequestError

Int32 = npt.NDArray[np.int32]
_OTHER = "change it, or try structured_output.backend = 'llguidance'"
_JSON = "structured_outputs.json at #"
_WORTH_A_THREAD = 2**19
"""Masks of this many tokens in all."""
_SHORT = 10_000
"""Characters of a constraint up to which its cost is estimated at admission, and not in the thread that compiles."""
_MOST_PRINTED = 2_000_000
"""Characters of a printed grammar that are looked at."""
_CHARACTERS, _NO_CONTROLS = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"
"""What XGrammar lets into strings of bounded length, and what JSON does."""
_PLACE_IN_SOURCE = re.compile(r"^(\[[\d:]+\] \S+:\d+: )?(Check failed: \(.*?\) is false: )?")


class XGrammarBackend:
    """Backend with one `GrammarCompiler`. The masks of a step are filled in a few threads.

    XGrammar's own threads are not used, because they cost more in a step of few masks: 3 ms on two busy cores.
    """

    def __init__(self, context: StructuredOutputContext) -> None:
        tokenizer, vocab_size = context.tokenizer, context.vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(context.eos_token_ids)
        )
        self.eos_token_ids = frozenset(context.eos_token_ids)
        self._tokenizer = tokenizer
        self._token_texts: list[bytes] = info.decoded_vocab
        self._vocab_size = vocab_size
        self._compile_limit = context.options.compile_limit
        threads = context.options.mask_threads or min(16, max(1, num_cores() - 1))
        self._fewest = -(-_WORTH_A_THREAD // vocab_size)
        self._matchers = [xgrammar.BatchGrammarMatcher(max_threads=1) for _ in range(threads)]
        self._pool = self._new_pool()
        self._process = os.getpid()
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=context.options.compile_threads, cache_limit_bytes=context.options.cache_bytes
        )
        # XGrammar takes special tokens, and those that the tokenizer lacks, for text if any text is allowed.
        ordinary = np.arange(-(-vocab_size // 32) * 32) < min(len(tokenizer), vocab_size)
        ordinary[[token for token in tokenizer.all_special_ids if token < vocab_size]] = False
        eos = np.isin(np.arange(len(ordinary)), context.eos_token_ids)
        self.no_text = frozenset(np.flatnonzero(eos | ~ordinary).tolist())
        self._eos_bits: Int32 = np.packbits(eos, bitorder="little").view(np.int32)
        self._ordinary_bits: Int32 = np.packbits(ordinary | eos, bitorder="little").view(np.int32)
        text_ends: Int32 = np.packbits(ordinary & eos, bitorder="little").view(np.int32)
        self._text_ends = [(int(word), text_ends[word]) for word in np.flatnonzero(text_ends)]
        self._cleared = np.flatnonzero(self._ordinary_bits != -1)  # words with tokens that are not text, mostly few

    def check(self, constraint: Constraint) -> None:
        """See the contract: parses the constraint, which takes a small part of compiling it."""
        kind, text = constraint.kind, constraint.text
        refuse_long_text(constraint)
        if kind == "json":
            _check_schema(text, _JSON)
        elif kind == "regex":
            self._refuse_regex(text)
        elif kind == "grammar" and (why := _refusal(xgrammar.Grammar.from_ebnf, text)):
            raise RequestError(f"structured_outputs.grammar: {why}", fix="correct it there")
        elif kind == "structural_tag":
            for structure in structures(text):
                _check_schema(json.dumps(structure.schema), structure.place)
        if len(text) <= _SHORT:
            self._refuse_printed(kind, _printed(constraint))

    def compile(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        """See the contract. XGrammar lets go of the interpreter while it compiles."""
        kind, text, compiler = constraint.kind, constraint.text, self._compiler
        try:
            if len(text) > _SHORT:
                self._refuse_printed(kind, _printed(constraint))
            if kind == "json":
                text = _prepared(text, _JSON)
                if grammar := _without_control_characters(text, any_whitespace=constraint.any_whitespace):
                    return compiler.compile_grammar(grammar)
                return compiler.compile_json_schema(text, any_whitespace=constraint.any_whitespace, strict_mode=False)
            if kind == "json_object":
                return compiler.compile_json_schema(
                    '{"type": "object"}', any_whitespace=constraint.any_whitespace, strict_mode=False
                )
            if kind == "regex":
                return compiler.compile_regex(text)
            if kind == "choice":
                return compiler.compile_grammar(_alternatives(json.loads(text)))
            if kind == "grammar":
                return compiler.compile_grammar(text)
            return compiler.compile_structural_tag(_triggered_tags(text))
        except RuntimeError as error:
            raise RequestError(f"structured_outputs.{kind}: {_plain(error)}", fix=_OTHER) from error

    def start(self, grammar: xgrammar.CompiledGrammar) -> GrammarState:
        """See the contract."""
        return XGrammarState(self, xgrammar.GrammarMatcher(grammar))

    def fill(
        self,
        states: Sequence[XGrammarState],
        drafts: Sequence[Sequence[int]],
        places: Sequence[int],
        bitmask: Int32,
    ) -> None:
        """Fill the masks (see the contract): the first masks in parallel, then those after drafts."""
        if self._process != os.getpid():  # a forked child, in which the pool has no threads
            self._pool, self._process = self._new_pool(), os.getpid()
        size = max(self._fewest, -(-len(states) // len(self._matchers)))
        others = [
            self._pool.submit(_fill, batch, states[at : at + size], places[at : at + size], bitmask)
            for batch, at in zip(self._matchers[1:], range(size, len(states), size), strict=False)
        ]
        try:
            _fill(self._matchers[0], states[:size], places[:size], bitmask)
        finally:
            wait(others)  # a caller that asks again for each state separately must be its only user
        for other in others:
            other.result()
        for state, place in zip(states, places, strict=True):
            self.mask_text_ends(state.matcher, bitmask[place])
        filled = list(places)
        for state, assumed, place in zip(states, drafts, places, strict=True):
            filled += range(place + 1, place + 1 + state.fill_behind(assumed, place, bitmask))
        bitmask[np.array(filled)[:, None], self._cleared] &= self._ordinary_bits[self._cleared]

    def mask_text_ends(self, matcher: xgrammar.GrammarMatcher, mask: Int32) -> None:
        """Clear the ends that are ordinary text in a mask [words], unless the text may end there.

        XGrammar (since 0.2.9) takes them for text where only one character may come next.
        """
        if self._text_ends and not matcher.is_completed():
            for word, bits in self._text_ends:
                mask[word] &= ~bits

    def token_text(self, token_id: int) -> bytes:
        """See the contract."""
        return self._token_texts[token_id]

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max(1, len(self._matchers) - 1), thread_name_prefix="slotline-xgrammar")

    def legal(self, matcher: xgrammar.GrammarMatcher) -> Int32:
        """Return the mask [words] of legal next tokens."""
        bitmask: Int32 = np.full((1, len(self._ordinary_bits)), -1, np.int32)
        matcher.fill_next_token_bitmask(bitmask)
        mask: Int32 = bitmask[0] & self._ordinary_bits
        return mask

    def goes_on(self, matcher: xgrammar.GrammarMatcher) -> bool:
        """Return True if anything but the end may come next."""
        return bool((self.legal(matcher) & ~self._eos_bits).any())

    def tokens(self, text: str) -> list[int]:
        """Return a text's tokens as inside a longer text."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _refuse_printed(self, kind: str, printed: Sequence[str]) -> None:
        """Refuse a constraint that cannot be compiled or takes too long, by its printed grammars.

        Raises:
            RequestError: with the rule, or with the estimate and the limit.
        """
        if rule := next(filter(None, map(endless, printed)), None):
            raise RequestError(
                f"structured_outputs.{kind}: the rule {rule} is a repetition of itself and matches no text",
                fix="give it another alternative, or something to match in front of itself",
            )
        if (length := sum(map(len, printed))) <= _MOST_PRINTED:
            estimate = sum(seconds(grammar, self._vocab_size) for grammar in printed)
            if estimate <= self._compile_limit:
                return
            what = f"would take XGrammar about {estimate:,.0f} s to compile"
        else:
            what = f"has a grammar of {length:,} characters, which takes XGrammar long to compile"
        raise RequestError(
            f"structured_outputs.{kind} {what}, more than structured_output.xgrammar.compile_limit="
            f"{self._compile_limit:g}",
            fix="make it smaller, raise the limit, or try structured_output.backend = 'llguidance'",
        )

    def _refuse_regex(self, text: str) -> None:
        if why := _refusal(xgrammar.Grammar.from_regex, text):
            raise RequestError(f"structured_outputs.regex={text!r}: {located(text, why)}", fix=_OTHER)
        if why := misread(text):
            raise RequestError(f"structured_outputs.regex={text!r:.60}: {why}", fix=_OTHER)
        if why := too_long(text):
            raise RequestError(f"structured_outputs.regex={text!r:.60}: {why}", fix="repeat less")


@define(eq=False)
class XGrammarState:
    """Matcher with only the known tokens. Trial tokens are rolled back."""

    backend: XGrammarBackend
    matcher: xgrammar.GrammarMatcher

    @property
    def finished(self) -> bool:
        """See the contract."""
        return bool(self.matcher.is_completed()) and not self.backend.goes_on(self.matcher)

    def accept(self, token_ids: Sequence[int]) -> int:
        """See the contract."""
        no_text, take = self.backend.no_text, self.matcher.accept_token
        for taken, token in enumerate(token_ids):
            if token in no_text or not take(token):
                return taken
        return len(token_ids)

    def count_legal(self, token_ids: Sequence[int]) -> int:
        """See the contract."""
        count = self.accept(token_ids)
        ends = count < len(token_ids) and token_ids[count] in self.backend.eos_token_ids
        ends = ends and bool(self.matcher.is_completed())
        self._take_back(count)
        return count + ends

    def forced(self) -> Sequence[int]:
        """See the contract."""
        try:
            text = self.matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # it begins inside a character
            return []
        return self.backend.tokens(text) if text else []

    def fill_behind(self, drafts: Sequence[int], place: int, bitmask: Int32) -> int:
        """Write the masks after drafts into the rows after `place`, and return the number of legal drafts."""
        walked = 0
        while walked < len(drafts) and self.accept(drafts[walked : walked + 1]):
            walked += 1
            self.matcher.fill_next_token_bitmask(bitmask, place + walked)
            self.backend.mask_text_ends(self.matcher, bitmask[place + walked])
        self._take_back(walked)
        return walked

    def _take_back(self, count: int) -> None:
        if count:
            self.matcher.rollback(count)


def _fill(
    batch: xgrammar.BatchGrammarMatcher, states: Sequence[XGrammarState], places: Sequence[int], bitmask: Int32
) -> None:
    """Fill the masks of some states, without the interpreter's lock."""
    batch.batch_fill_next_token_bitmask([state.matcher for state in states], bitmask, list(places))


def _check_schema(text: str, place: str) -> None:
    """Refuse a schema that XGrammar does not enforce in full.

    Raises:
        RequestError: with the place of the innermost part that it does not.
    """
    asked = subschemas(json.loads(text))
    text = _prepared(text, place)
    for (pointer, wanted), (_, part) in zip(asked, subschemas(json.loads(text)), strict=True):
        if why := unenforced(wanted) or unenforced(part) or broken_by(part):
            raise RequestError(f"{place}{pointer[1:]}: XGrammar does not enforce {why}", fix=_OTHER)
    refuse_uncounted_names(text, place)
    refuse(text, lambda part: _refusal(xgrammar.Grammar.from_json_schema, part), _OTHER, place)


def _prepared(text: str, place: str) -> str:
    """Return a schema as it is compiled.

    Raises:
        RequestError: with the JSON pointer of what cannot be.
    """
    root = json.loads(screened(text, place))
    in_ascii(root)
    return json.dumps(root, ensure_ascii=False)


def _refusal(parse: Callable[[str], Any], text: str) -> str | None:
    """Return the reason why XGrammar cannot parse a text, or None."""
    try:
        parse(text)
    except RuntimeError as error:
        return _plain(error)
    return None


def _plain(error: RuntimeError) -> str:
    """Return the message without the location in XGrammar's sources."""
    return _PLACE_IN_SOURCE.sub("", str(error).strip()).rstrip(".")


def _printed(constraint: Constraint) -> list[str]:
    """Return the grammars of a constraint in XGrammar's notation, those of a structural tag apart."""
    kind, text = constraint.kind, constraint.text
    if kind == "json":
        return [str(xgrammar.Grammar.from_json_schema(_prepared(text, _JSON), strict_mode=False))]
    if kind == "regex":
        return [str(xgrammar.Grammar.from_regex(text))]
    if kind == "choice":
        return [str(xgrammar.Grammar.from_ebnf(_alternatives(json.loads(text))))]
    if kind == "grammar":
        return [str(xgrammar.Grammar.from_ebnf(text))]
    if kind == "structural_tag":
        found = (_prepared(json.dumps(structure.schema), structure.place) for structure in structures(text))
        return [str(xgrammar.Grammar.from_json_schema(schema, strict_mode=False)) for schema in found]
    return []


def _alternatives(choices: Sequence[str]) -> str:
    """Return a grammar of the texts in `choices`."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _without_control_characters(schema: str, *, any_whitespace: bool = True) -> str | None:
    """Return XGrammar's corrected grammar of a schema with strings of bounded length, or None without bounds.

    JSON strings contain no control characters, but XGrammar (0.2.8) allows them with `minLength` or `maxLength`.
    """
    if "Length" not in json.dumps(json.loads(schema)):  # also where the key is written with escapes
        return None
    grammar = str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=any_whitespace, strict_mode=False))
    return grammar.replace(_CHARACTERS, _NO_CONTROLS) if _CHARACTERS in grammar else None


def _content(schema: Any) -> dict[str, Any]:
    """Return the inside of a structural tag in XGrammar's own form."""
    if grammar := _without_control_characters(json.dumps(schema)):
        return {"type": "grammar", "grammar": grammar}
    return {"type": "json_schema", "json_schema": schema}


def _triggered_tags(text: str) -> str:
    """Return a structural tag in XGrammar's own form."""
    found = structures(text)
    tags = [
        {
            "type": "tag",
            "begin": structure.begin,
            "content": _content(json.loads(_prepared(json.dumps(structure.schema), structure.place))),
            "end": structure.end,
        }
        for structure in found
    ]
    triggers = list(dict.fromkeys(structure.trigger for structure in found))
    wanted = {"type": "triggered_tags", "triggers": triggers, "tags": tags, **asdict(demands(text))}
    return json.dumps({"type": "structural_tag", "format": wanted})
