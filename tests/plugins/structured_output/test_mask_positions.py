"""Positions in texts of expressions, grammars and structural tags: those with one position have the same masks."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from kept_masks import Pair
from random_constraints import RANDOM

from slotline.core import StructuredOutputsParams
from slotline.plugins.structured_output.choice_positions import ChoiceForm
from slotline.plugins.structured_output.mask_cache import Texts, form_of
from slotline.plugins.structured_output.rule_positions import ExpressionForm, RuleForm
from slotline.plugins.structured_output.tag_positions import TagForm
from slotline.registry.errors import ContractError, RequestError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(102)]

CUT = 'root ::= ("a" | "ab" | "b" | "b c" | "(" root ")")*'
"""Of `ab`, llguidance makes one terminal, behind which no ` c` may come; the rules allow it."""
TAG: dict[str, Any] = {
    "structures": [
        {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"},
        {"begin": "<f2>", "schema": {"type": "array"}, "end": "</f>"},
    ],
    "triggers": ["<f"],
}


def walked(plugin: str, kind: str, seeds: range) -> tuple[int, int]:
    """Walk through random constraints. Return how many masks were kept, and asked for."""
    found = asked = 0
    for seed in seeds:
        wanted = {kind: RANDOM[kind](Random(seed))}
        if isinstance(form_of(StructuredOutputsParams(**wanted).constraint), Texts | None):
            continue
        try:
            pair = Pair(plugin, **wanted)
            for walk in range(4):
                pair.walk(Random(walk), 20, drafts=3 * (walk % 2) * (kind != "grammar"))
        except (RequestError, ContractError):  # too complex, or a text that nothing can follow
            continue
        found, asked = found + pair.found, asked + pair.asked
    return found, asked


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("plugin", ["llguidance", "xgrammar"])
def test_masks_kept_under_random_constraints_equal_those_that_the_plugin_makes(plugin: str, kind: str) -> None:
    found, asked = walked(plugin, kind, range(5))
    assert found > asked


@pytest.mark.slow
@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("plugin", ["llguidance", "xgrammar"])
def test_masks_kept_under_many_random_constraints_equal_those_that_the_plugin_makes(plugin: str, kind: str) -> None:
    found, asked = walked(plugin, kind, range(100, 125))
    assert found > asked > 0


def test_a_grammars_position_is_no_set_of_ways_since_engines_drop_some() -> None:
    with pytest.raises(AssertionError):
        Pair("llguidance", ExpressionForm("(a|ab|b|b c)*"), grammar=CUT).walk_often(60, 12)
    Pair("llguidance", grammar=CUT).walk_often(20, 12)


def test_a_position_in_free_text_that_forgets_a_trigger_gives_other_masks() -> None:
    form = TagForm(json.dumps(TAG))
    form._parts = {b""}
    with pytest.raises(AssertionError):
        Pair("llguidance", form, structural_tag={**TAG, "at_least_one": True}).walk_often(4, 4)


def after(form: Any, text: str) -> Any:
    return form.after(form.start, text.encode())


def test_texts_of_an_expression_that_can_go_on_alike_have_one_position() -> None:
    form = ExpressionForm(r"^([a-c]\d{2}|\wé;)+$")
    assert after(form, "a12") == after(form, "b99xé;") != after(form, "a1")
    assert after(form, "a") != after(form, "x")
    assert after(form, "ж") == after(form, "x")  # nothing else takes it
    assert after(form, "é") is not None
    assert after(ExpressionForm(r"(\w|é)x"), "é") is None  # taken once or twice, as an engine sees letters
    assert after(ExpressionForm(r"(.|\n)x"), "\n") is None
    assert form.after(form.start, "é".encode()[:1]) != form.start


def test_texts_of_a_grammar_that_can_go_on_alike_have_one_position() -> None:
    form = RuleForm('root ::= term (("+" | "-") term)*  # comment\nterm ::= [0-9]+ |\n "(" root ")"')
    assert after(form, "(1+2") == after(form, "(937") == after(form, "((1)-(2)+4")
    assert after(form, "(1") != after(form, "1") == after(form, "(1)+(2)-3")
    assert after(form, "((1") != after(form, "(1")
    assert after(form, "x") is None
    form = RuleForm(CUT)
    assert after(form, "ab") != after(form, "b")  # the same ways, of which an engine may have dropped one
    assert after(form, "aba") == after(form, "a") or after(form, "aba")[1] == "aba"


def test_positions_in_a_structural_tag() -> None:
    form = TagForm(json.dumps(TAG))
    assert after(form, "some text") == form.start != after(form, "some <")
    assert after(form, 'x<f>{"a": 1}') == after(form, 'y<f>{"bc":[2]}')
    assert after(form, "<f>{}</f>") == after(form, "<f2>[1] </f> more") != form.start
    assert after(form, "<f>1") is None
    assert after(form, "<f3") is None


@pytest.mark.parametrize(
    "wanted",
    [
        *({"regex": text} for text in ("(?i)a", "a*?", "[[:alpha:]]", "(?=a)a", "a|^b$", r"\ba", r"\p{L}", "[a&&b]")),
        {"regex": "a{2"},
        {"regex": "((a{100}){100}){100}"},
        {"regex": "(" * 70 + "a" + ")" * 70},
        {"grammar": 'root ::= root "a" | "b"'},
        {"grammar": 'root ::= p\np ::= "a"? q\nq ::= p "b" | "c"'},
        {"grammar": 'root ::= "a" p'},
        {"grammar": 'root ::= "\\xff"'},
        {"grammar": 'p ::= "a"'},
        {"structural_tag": {**TAG, "structures": [{"begin": "<f>", "schema": {"not": {}}, "end": "</f>"}]}},
        {"structural_tag": {**TAG, "structures": [{"begin": "<f>", "schema": {}, "end": ""}]}},
        {"structural_tag": {**TAG, "structures": [{"begin": "<f>", "schema": {}, "end": "</f><"}]}},
    ],
    ids=str,
)  # fmt: skip
def test_what_engines_may_read_in_different_ways_has_no_positions(wanted: dict[str, Any]) -> None:
    assert isinstance(form_of(StructuredOutputsParams(**wanted).constraint), Texts | None)


def test_choices_of_which_the_same_is_left_have_one_position() -> None:
    form = form_of(StructuredOutputsParams(choice=["one item", "two items", "an item", "an", "é"]).constraint)
    assert isinstance(form, ChoiceForm)

    def at(text: bytes) -> Any:
        return form.after(form.start, text)

    assert at(b"one it") != at(b"two it")  # `s` is left too
    assert at(b"one item") == at(b"an item") == at(b"two items") == at("é".encode())
    assert at(b"an") not in (at(b"one"), None)  # it may end there
    assert at(b"one x") is None
    assert isinstance(form_of(StructuredOutputsParams(choice=["x" * 200_000]).constraint), Texts)


@pytest.mark.parametrize("plugin", ["llguidance", "xgrammar"])
def test_masks_of_choices_that_end_alike_equal_those_that_the_plugin_makes(plugin: str) -> None:
    ends = ["as it was", "as it", "somewhere else", "é or è", ""]
    pair = Pair(plugin, choice=[f"{begin}{end}" for begin in ("it is ", "a", "12: ", "as ", "é") for end in ends])
    pair.walk_often(30, 20, drafts=2)
    assert pair.found > 2 * pair.asked
