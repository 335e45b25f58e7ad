"""Constraints that take long to compile: XGrammar's are refused by an estimate, llguidance's meet its own limits."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import Any

import pytest
import xgrammar
from structured_texts import Texts, context

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.plugins.structured_output.screen import MOST_TEXT
from slotline.plugins.structured_output.xgrammar.cost import seconds
from slotline.registry.errors import ContractError, RequestError
from slotline.testing.subject import subject_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(102)]


def options(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


SLOW: dict[str, dict[str, Any]] = {
    "stars": {"regex": ".*" * 3000},
    "stars in a pattern": {"json": {"type": "string", "pattern": ".*" * 3000}},
    "stars in a tag": {
        "structural_tag": {
            "structures": [{"begin": "<a>", "schema": {"type": "string", "pattern": ".*" * 3000}, "end": "</a>"}],
            "triggers": ["<"],
        }
    },
    "options": {"regex": "a?" * 1000 + "a" * 1000},
    "a grammar": {"grammar": f"root ::= {'[a-z]* ' * 2000}"},
    "rules": {"grammar": "root ::= " + "a " * 1500 + '\na ::= "x" | ""'},
    "choices": {"choice": [f"choice {i} {'x' * 20}" for i in range(20_000)]},
    "an enum": {"json": {"enum": [f"value number {i}" for i in range(20_000)]}},
    "properties": {"json": options(2000)},
    "objects": {"json": {"anyOf": [options(3)] * 1000}},
}
QUICK: dict[str, dict[str, Any]] = {
    "one of many choices": {"choice": [f"a{i}" for i in range(3000)]},
    "a repeat of a repeat": {"regex": "((a|b){1,3000}c){1,3000}"},
    "repeats four deep": {"regex": "((([ab]{0,30}c?){0,30}c?){0,30}c?){0,30}"},
    "quoted parts": {"regex": '"[^"]*"' * 800},
    "an expression that doubles": {"regex": "(a|b)*a(a|b){18}"},
    "an array of many": {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 200_000}},
    "a long string": {"json": {"type": "string", "maxLength": 1_000_000}},
    "properties": {"json": options(200)},
    "rules that double": {
        "grammar": "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(25)) + '\nr25 ::= "a"'
    },
}


@pytest.mark.parametrize("wanted", SLOW.values(), ids=SLOW)
def test_a_constraint_that_xgrammar_would_compile_for_long_is_refused_with_the_limit(wanted: dict[str, Any]) -> None:
    texts, begin = Texts("xgrammar"), monotonic()
    with pytest.raises(RequestError, match=r"more than structured_output\.xgrammar\.compile_limit=6") as refused:
        texts.compiled(**wanted)
    assert "llguidance" in refused.value.fix
    assert monotonic() - begin < 10


@pytest.mark.parametrize("wanted", QUICK.values(), ids=QUICK)
def test_large_constraints_that_xgrammar_compiles_quickly_are_taken(wanted: dict[str, Any]) -> None:
    Texts("xgrammar").compiled(**wanted)


def test_the_limit_is_an_option_and_the_estimate_grows_with_the_vocabulary() -> None:
    stars = StructuredOutputsParams(regex=".*" * 200).constraint
    subject_of("structured_output:xgrammar").build(context()).check(stars)
    with pytest.raises(RequestError, match=r"about 1 s to compile, more than .*compile_limit=0\.1"):
        subject_of("structured_output:xgrammar", options={"compile_limit": 0.1}).build(context()).check(stars)
    printed = str(xgrammar.Grammar.from_regex(stars.text))
    assert seconds(printed, 128_000) > 20 * seconds(printed, 4096) > 20


@pytest.mark.spread(3)
@pytest.mark.parametrize("wanted", [*SLOW.values(), *QUICK.values()], ids=[*SLOW, *QUICK])
def test_llguidance_compiles_or_gives_up_in_time(wanted: dict[str, Any]) -> None:
    texts, begin = Texts("llguidance"), monotonic()
    with suppress(RequestError, ContractError):
        texts.compiled(**wanted)
    assert monotonic() - begin < 20


@pytest.mark.parametrize("plugin", ["xgrammar", "llguidance"])
def test_a_constraint_that_takes_long_to_read_is_refused(plugin: str) -> None:
    with pytest.raises(RequestError, match=r"has 1,000,00[0-9] characters, more than 1,000,000"):
        Texts(plugin).compiled(regex="a|" * (MOST_TEXT // 2) + "b")


def test_the_others_go_on_where_a_constraint_is_refused_while_it_compiles() -> None:
    llm = LLM(max_model_len=64, memory="4MiB", **{"structured_output.backend": "xgrammar"})
    slow, quick = (
        SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(**wanted))
        for wanted in (SLOW["an enum"], {"choice": ["yes"]})
    )
    refused, taken = (output.outputs[0] for output in llm.generate(["x", "y"], [slow, quick]))
    assert refused.finish_reason == "error"
    assert "compile_limit=6" in str(refused.stop_reason)
    assert (taken.text, taken.finish_reason) == ("yes", "stop")
