"""Kept masks: equal to those that the plugin would make, whatever is left out of a text to find them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from attrs import evolve
from kept_masks import Pair
from structured_texts import context, tokens_of

from slotline.core import StructuredOutputsParams
from slotline.plugins.structured_output.json_positions import START, JsonForm
from slotline.plugins.structured_output.mask_cache import CachedGrammar, MaskCache
from slotline.testing.subject import subject_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(102)]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BRANCHES = [
    {
        "type": "object",
        "properties": {"k": {"const": letter}, other: kind},
        "required": ["k", other],
        "additionalProperties": False,
    }
    for letter, other, kind in (("a", "v", {"type": "integer"}), ("b", "w", {"type": "string"}))
]
SCHEMAS: dict[str, Any] = {
    "lengths": PERSON,
    "numbers": {"type": "array", "items": {"type": ["number", "null"]}},
    "bounds": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "minItems": 3},
    "literals": {"type": "array", "items": {"enum": ["x", "xy", "é", 'q"', 1, 12, None]}},
    "branches": {"anyOf": BRANCHES},
    "a reference": {
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}]}, "name": {"type": "string"}},
        "required": ["a"],
        "$defs": {"P": PERSON},
        "additionalProperties": False,
    },
    "a tree": {
        "$ref": "#/$defs/T",
        "$defs": {
            "T": {
                "type": "object",
                "properties": {"v": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/T"}}},
                "required": ["v", "kids"],
                "additionalProperties": False,
            }
        },
    },
    "expressions": {
        "type": "object",
        "properties": {"d": {"type": "string", "format": "date"}, "t": {"type": "string"}, "größe": {"type": "number"}},
        "required": ["d", "t"],
        "additionalProperties": {"type": "string"},
    },
    "items": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": {"type": "boolean"}},
}
GRAMMAR = 'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")" | name\nname ::= [a-zé] [a-z0-9]*'
TAG = {
    "structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}, {"begin": "<g=", "schema": {}, "end": ">"}],
    "triggers": ["<f", "<g"],
    "at_least_one": True,
}
WANTED: dict[str, dict[str, Any]] = {
    **{f"{name}, {space}": {"json": one, "disable_any_whitespace": space == "fixed"}
       for name, one in SCHEMAS.items() for space in ("any space", "fixed")},
    "any object": {"json_object": True},
    "choice": {"choice": ["yes", "no", "maybe so", "mayhem"]},
    "expression": {"regex": r"(\[[A-C]\d{3}\] (ok|läte);)+"},
    "rules": {"grammar": GRAMMAR},
    "tag": {"structural_tag": TAG},
}  # fmt: skip


@pytest.mark.parametrize("plugin", ["llguidance", "xgrammar"])
def test_kept_masks_equal_those_that_the_plugin_makes(plugin: str) -> None:
    found = asked = 0
    for number, wanted in enumerate(WANTED.values()):
        pair, rng = Pair(plugin, **wanted), Random(number)
        for _ in range(3):
            pair.walk(rng, 24)
        found, asked = found + pair.found, asked + pair.asked
    assert found > asked


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("plugin", ["llguidance", "xgrammar"])
def test_kept_masks_equal_those_that_the_plugin_makes_in_long_texts(plugin: str, seed: int) -> None:
    for wanted in WANTED.values():
        pair = Pair(plugin, **wanted)
        for round_ in range(8):
            pair.walk(Random(100 * seed + round_), 60, drafts=3 * (round_ % 2))


@pytest.mark.parametrize("plugin", ["llguidance", "xgrammar"])
def test_masks_behind_drafts_are_kept_too(plugin: str) -> None:
    pair = Pair(plugin, json=PERSON, disable_any_whitespace=True)
    pair.walk_often(6, 16, drafts=3)
    assert pair.found > 10


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("branches", {"values": True}),  # the value of a property decides which others may follow
        ("bounds", {"items": True}),  # items are counted
        ("literals", {"literals": ()}),  # strings are told apart as long as they begin a literal
        ("lengths", {"kinds": {b"": (2, 5), b"[": (2, 5)}}),  # the characters of a string are counted
        ("bounds", {"kinds": {b"": (2, 5), b"[": (2, 5)}}),  # digits matter
    ],
)
def test_a_position_that_leaves_out_too_much_gives_other_masks(name: str, left_out: dict[str, Any]) -> None:
    form = JsonForm.of(json.dumps(SCHEMAS[name]))
    assert form is not None
    pair = Pair("llguidance", evolve(form, **left_out), json=SCHEMAS[name], disable_any_whitespace=True)
    with pytest.raises(AssertionError):
        pair.walk_often(60, 40)


def test_texts_that_can_go_on_alike_have_one_position() -> None:
    form = JsonForm.of(json.dumps(PERSON))
    assert form is not None

    def at(text: str) -> Any:
        return form.after(START, text.encode())

    assert at('{"name": "abc", "age": 12') == at('{ "name":"x\\"yz","age" :\n7')
    assert at('{"name": "abc') == at('{"name": "xyz')
    assert at('{"name": "ab') != at('{"name": "abc')
    assert at('{"name": "na') != at('{"name": "ab')  # it may become a literal, for all that is known of the place
    assert at('{"name": "é'.encode()[:-1].decode("latin-1")) != at('{"name": "')
    assert JsonForm.of('{"not": {"type": "string"}}') is None
    assert JsonForm.of('{"enum": [{"a": 1}]}') is None


def test_a_grammar_whose_texts_do_not_meet_again_is_left_to_the_plugin() -> None:
    pair = Pair("llguidance", regex=r"(?i)[a-z]{900}")
    pair.walk_often(4, 200)
    assert pair.grammar.given_up
    before = pair.found
    pair.walk(Random(0), 5)
    assert pair.found == before


def test_texts_that_go_the_same_way_meet_however_long_they_are() -> None:
    text = "".join(Random(0).choices("0123456789abcdef", k=1600))
    pair = Pair("xgrammar", choice=[text, "no"])
    states = [pair.grammar.start(pair.backend) for _ in range(3)]
    for token in tokens_of(text):
        assert [state.accept([token]) for state in states] == [1, 1, 1]
    assert not pair.grammar.given_up
    assert states[0].finished


def test_an_end_with_text_of_its_own_is_never_passed() -> None:
    newline = tokens_of("\n")[0]
    subject = subject_of("structured_output:llguidance")
    backend, constraint = subject.build(context((newline,))), StructuredOutputsParams(regex="a\n?b").constraint
    grammar = CachedGrammar(backend.compile(constraint), constraint, MaskCache(backend.token_text, (newline,)))
    state = grammar.start(backend)
    assert state.accept([*tokens_of("a"), newline]) == 1
    assert state.accept(tokens_of("b")) == 1
    assert state.finished


def test_masks_of_text_that_must_come_are_asked_for_once_unless_they_may_hang_on_the_last_token() -> None:
    asked = {}
    for plugin in ("llguidance", "xgrammar"):
        pair = Pair(plugin, regex=r"\d{3}\] ok;")
        for digit in "0123456789":
            state = pair.grammar.start(pair.backend)
            state.accept(tokens_of(f"12{digit}"))
            if state.kept_mask() is None:
                pair.asked += 1
                state.keep([], pair.filled(state.current(), []))
        asked[plugin] = pair.asked
    assert asked == {"llguidance": 10, "xgrammar": 1}
